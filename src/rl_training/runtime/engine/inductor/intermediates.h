// An intermediate result that keeps its memory from call to call, or a view of one. Kernels of the graph use its
// address. A reference-counted tensor is created only for library operations, which ask for a handle.
#include <utility>

namespace rl_training {

class Kept {
 public:
  Kept(AtenTensorHandle handle, void* data, int64_t itemsize)
      : base_(handle), data_(static_cast<char*>(data)), itemsize_(itemsize) {}
  Kept(const Kept& of, int64_t ndim, const int64_t* sizes, const int64_t* strides, int64_t offset)
      : base_(of.base_), data_(of.data_ + offset * of.itemsize_), itemsize_(of.itemsize_), ndim_(ndim), sizes_(sizes),
        strides_(strides), offset_(of.offset_ + offset) {}

  void* data_ptr() const { return data_; }
  operator AtenTensorHandle() const {
    if (sizes_ == nullptr) return base_;
    if (view_.get() == nullptr)
      view_ = RAIIAtenTensorHandle(
          torch::aot_inductor::reinterpret_tensor_wrapper(base_, ndim_, sizes_, strides_, offset_));
    return view_.get();
  }
  AtenTensorHandle get() const { return *this; }
  AtenTensorHandle release() const { // the caller owns the new handle
    AtenTensorHandle handle = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(*this, &handle));
    return handle;
  }
  void reset() {}

 private:
  AtenTensorHandle base_;
  char* data_;
  int64_t itemsize_;
  int64_t ndim_ = 0;
  const int64_t *sizes_ = nullptr, *strides_ = nullptr; // of a view
  int64_t offset_ = 0;
  mutable RAIIAtenTensorHandle view_;
};

// Inductor's code calls these to create a view.
inline Kept reinterpret_tensor_wrapper(
    const Kept& of, int64_t ndim, const int64_t* sizes, const int64_t* strides, int64_t offset) {
  return Kept(of, ndim, sizes, strides, offset);
}

inline Kept wrap_with_raii_handle_if_needed(Kept&& view) {
  return std::move(view);
}

} // namespace rl_training
