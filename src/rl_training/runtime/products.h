// Products of small matrices, c = a b, with all sizes and strides as constants. A library call costs a microsecond or
// two before it begins and packs both factors; here the left one is read where it is, and the right one is packed only
// where its rows are not contiguous.
#include <ATen/cpu/vec/vec.h>
#include <memory>

namespace rl_training {

using Vec = at::vec::Vectorized<float>;
constexpr long W = Vec::size();
constexpr long DEPTH = 128; // terms of the sums that are taken at a time: their rows of b stay in the first cache

inline float* packing_space(long size) {
  static thread_local std::unique_ptr<float[]> space;
  static thread_local long held = 0;
  if (held < size) {
    space.reset(new float[size]());
    held = size;
  }
  return space.get();
}

// R rows and C vectors of columns of c, the last of them with `tail` columns (0: all); `more`: add to what is there.
template <int R, int C, int tail, long a0, long a1, long b0, long c0>
inline __attribute__((always_inline)) void block(long depth, const float* a, const float* b, float* c, bool more) {
  Vec sums[R][C];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 8
    for (int j = 0; j < C; j++)
      sums[i][j] = !more ? Vec(0.0f) : Vec::loadu(c + i * c0 + j * W, tail && j == C - 1 ? tail : W);
  for (long k = 0; k < depth; k++) {
    Vec right[C];
#pragma GCC unroll 8
    for (int j = 0; j < C; j++) right[j] = Vec::loadu(b + k * b0 + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) {
      const Vec left(a[i * a0 + k * a1]);
#pragma GCC unroll 8
      for (int j = 0; j < C; j++) sums[i][j] = at::vec::fmadd(left, right[j], sums[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 8
    for (int j = 0; j < C; j++) sums[i][j].store(c + i * c0 + j * W, tail && j == C - 1 ? tail : W);
}

template <long M, int C, int tail, long a0, long a1, long b0, long c0>
inline void columns(long depth, const float* a, const float* b, float* c, bool more) {
  constexpr long R = 6, rest = M % R; // 12 sums, two vectors of b and one of a: 15 of 16 registers
  long i = 0;
  for (; i + R <= M; i += R) block<R, C, tail, a0, a1, b0, c0>(depth, a + i * a0, b, c + i * c0, more);
  if constexpr (rest != 0) block<rest, C, tail, a0, a1, b0, c0>(depth, a + i * a0, b, c + i * c0, more);
}

// For few rows, where the terms of each sum are contiguous in both factors.
template <long M, long N, long K, long a0, long b1, long c0>
inline void dots(const float* a, const float* b, float* c) {
  for (long n = 0; n < N; n++)
    for (long m = 0; m < M; m++) {
      Vec sum(0.0f);
      long k = 0;
      for (; k + W <= K; k += W) sum = at::vec::fmadd(Vec::loadu(a + m * a0 + k), Vec::loadu(b + n * b1 + k), sum);
      alignas(64) float parts[W];
      sum.store(parts);
      float total = 0.0f;
      for (long i = 0; i < W; i++) total += parts[i];
      for (; k < K; k++) total += a[m * a0 + k] * b[n * b1 + k];
      c[m * c0 + n] = total;
    }
}

// b as panels of 2 W columns, each with contiguous rows.
template <long N, long K, long b0, long b1>
inline const float* packed(const float* b) {
  constexpr long P = 2 * W, whole_k = b1 != 1 ? K / W * W : 0, whole_n = b1 != 1 ? N / W * W : 0;
  float* panels = packing_space((N + P - 1) / P * P * K);
  for (long n = 0; n < whole_n; n += W)
    for (long k = 0; k < whole_k; k += W)
      at::vec::transpose_mxn<float, W, W>(b + n * b1 + k * b0, b1, panels + n / P * P * K + n % P + k * P, P);
  for (long k = 0; k < K; k++)
    for (long n = k < whole_k ? whole_n : 0; n < N; n++) panels[n / P * P * K + n % P + k * P] = b[k * b0 + n * b1];
  return panels;
}

// c[M, N] with contiguous rows, from a[M, K] with strides a0, a1 and b[K, N] with strides b0, b1, one of which is 1.
template <long M, long N, long K, long a0, long a1, long b0, long b1, long c0>
inline void product(const float* a, const float* b, float* c) {
  if constexpr (M <= 4 && a1 == 1 && b0 == 1) {
    dots<M, N, K, a0, b1, c0>(a, b, c);
  } else {
    constexpr bool pack = b1 != 1 || N % W != 0;
    constexpr long P = 2 * W, stride = pack ? P : b0, last = N / P * P;
    constexpr int left = N - last, tail = N % W;
    if constexpr (pack) b = packed<N, K, b0, b1>(b);
    for (long k = 0; k < K; k += DEPTH) {
      const long depth = K - k < DEPTH ? K - k : DEPTH;
      const auto rows = [&](long n) { return b + (pack ? n * K : n) + k * stride; };
      for (long n = 0; n < last; n += P) columns<M, 2, 0, a0, a1, stride, c0>(depth, a + k * a1, rows(n), c + n, k > 0);
      if constexpr (left != 0)
        columns<M, (left > W ? 2 : 1), tail, a0, a1, stride, c0>(depth, a + k * a1, rows(last), c + last, k > 0);
    }
  }
}

} // namespace rl_training
