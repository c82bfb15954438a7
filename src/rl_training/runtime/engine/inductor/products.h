// Products of small matrices, c = a b, with all sizes and strides as constants. A library call takes a microsecond or
// two before it begins, and it packs both factors. Here, the left factor is read in place, and the right factor is
// packed only if its rows are not contiguous. The bias and activation of a layer are applied to the sums before they
// are stored.
#include <ATen/cpu/vec/vec.h>
#include <cstring>
#include <memory>

namespace rl_training {

using Vec = at::vec::Vectorized<float>;
constexpr long W = Vec::size();

inline float* working_space(int number, long size) {
  static thread_local std::unique_ptr<float[]> space[3];
  static thread_local long held[3] = {};
  if (held[number] < size) {
    space[number].reset(new float[size]());
    held[number] = size;
  }
  return space[number].get();
}

// Force a value into a register. Compilers would rather load it again for each use, more often than the processor can,
// or keep it in a register all the time, although every register is needed for the sums.
inline __attribute__((always_inline)) Vec in_register(Vec x) {
#if defined(CPU_CAPABILITY_AVX512)
  __m512 value = x;
  asm volatile("" : "+v"(value));
  return value;
#elif defined(CPU_CAPABILITY_AVX2)
  __m256 value = x;
  asm volatile("" : "+x"(value));
  return value;
#else
  return x;
#endif
}

// --- epilogues: what happens to the sums; `at` moves to the position of a block ---

struct Stored {
  Stored at(long, long) const { return *this; }
  void prefetch(long) const {}
  Vec operator()(Vec x, long, long, long) const { return x; }
};

struct BiasAndRelu {
  const float* bias; // one for each column
  BiasAndRelu at(long, long column) const { return {bias + column}; }
  void prefetch(long) const {}
  Vec operator()(Vec x, long, long column, long count) const {
    return at::vec::clamp_min(x + Vec::loadu(bias + column, count), in_register(Vec(0.0f)));
  }
};

// The gradient of a relu: zero where its result, a matrix with N columns, is not positive.
template <long N>
struct ReluSlope {
  const float* result;
  ReluSlope at(long row, long column) const { return {result + row * N + column}; }
  void prefetch(long row) const { __builtin_prefetch(result + row * N); }
  Vec operator()(Vec x, long row, long column, long count) const {
    const Vec zero = in_register(Vec(0.0f));
    return Vec::blendv(x, zero, Vec::loadu(result + row * N + column, count) <= zero);
  }
};

// --- the product ---

// R rows and C vectors of columns of c, the last vector with `tail` columns (0: all). The terms may come in parts: all
// but the first part add to the stored sums, and the last part applies the epilogue.
template <int R, int C, int tail, long a0, long a1, long b0, long c0, class End>
inline __attribute__((always_inline)) void block(
    long depth, const float* a, const float* b, float* c, bool first, bool last, End end) {
  const auto count = [](int j) { return tail && j == C - 1 ? tail : W; };
  Vec sums[R][C];
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
#pragma GCC unroll 8
    for (int j = 0; j < C; j++) sums[i][j] = first ? Vec(0.0f) : Vec::loadu(c + i * c0 + j * W, count(j));
  for (long k = 0; k < depth; k++) {
    Vec right[C];
#pragma GCC unroll 8
    for (int j = 0; j < C; j++) right[j] = in_register(Vec::loadu(b + k * b0 + j * W));
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      const Vec left(a[i * a0 + k * a1]);
#pragma GCC unroll 8
      for (int j = 0; j < C; j++) sums[i][j] = at::vec::fmadd(left, right[j], sums[i][j]);
    }
  }
  if (last)
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
#pragma GCC unroll 8
      for (int j = 0; j < C; j++) sums[i][j] = end(sums[i][j], i, j * W, count(j));
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
#pragma GCC unroll 8
    for (int j = 0; j < C; j++) sums[i][j].store(c + i * c0 + j * W, count(j));
}

// All rows, in blocks of R and a last block of `rest`.
constexpr long R = 6; // 12 sums, two vectors of b and one of a: 15 of 16 registers
template <int rest, int C, int tail, long a0, long a1, long b0, long c0, class End>
inline void columns(long m, long depth, const float* a, const float* b, float* c, bool first, bool last, End end) {
  long i = 0;
  for (; i + R <= m; i += R) {
    // Rows are not contiguous: no processor predicts that the next ones, or their next columns, are needed soon.
    if constexpr (a1 == 1 && b0 > C * W)
      for (long k = i; k < i + R && k < depth; k++) __builtin_prefetch(b + k * b0 + C * W, 0, 2);
    for (long next = i + R; next < i + 2 * R && next < m; next++) {
      __builtin_prefetch(c + next * c0, 1);
      end.prefetch(next);
    }
    block<R, C, tail, a0, a1, b0, c0>(depth, a + i * a0, b, c + i * c0, first, last, end.at(i, 0));
  }
  if constexpr (rest != 0)
    if (i < m) block<rest, C, tail, a0, a1, b0, c0>(depth, a + i * a0, b, c + i * c0, first, last, end.at(i, 0));
}

// For few rows, if the terms of each sum are contiguous in both factors.
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
  float* panels = working_space(0, (N + P - 1) / P * P * K);
  for (long n = 0; n < whole_n; n += W)
    for (long k = 0; k < whole_k; k += W)
      at::vec::transpose_mxn<float, W, W>(b + n * b1 + k * b0, b1, panels + n / P * P * K + n % P + k * P, P);
  for (long k = 0; k < K; k++)
    for (long n = k < whole_k ? whole_n : 0; n < N; n++) panels[n / P * P * K + n % P + k * P] = b[k * b0 + n * b1];
  return panels;
}

template <long M, long N, long K, long a0, long a1, long b0, long b1, class End>
inline void all_columns(long m, long terms, const float* a, const float* b, float* c, End end) {
  // Rows at distances of a power of two compete for a few lines of the first cache: with many rows of a, packing pays
  // off for that reason alone.
  constexpr bool pack = b1 != 1 || N % W != 0 || M >= 1024;
  constexpr int rest = M % R;
  constexpr long P = 2 * W, stride = pack ? P : b0, whole = N / P * P;
  constexpr long DEPTH = a1 == 1 ? 256 : 128; // terms at a time, so that their inputs stay in the first cache
  constexpr long PART = 30 * R; // rows at a time, so that they stay in the second cache for all columns
  constexpr int left = N - whole, tail = N % W;
  if constexpr (pack) b = packed<N, K, b0, b1>(b);
  for (long i = 0; i < m; i += PART) {
    const long part = m - i < PART ? m - i : PART;
    for (long k = 0; k < terms; k += DEPTH) {
      const long depth = terms - k < DEPTH ? terms - k : DEPTH;
      const bool first = k == 0, last = k + DEPTH >= terms;
      const auto rows = [&](long n) { return b + (pack ? n * K : n) + k * stride; };
      const float* from = a + i * a0 + k * a1;
      for (long n = 0; n < whole; n += P)
        columns<rest, 2, 0, a0, a1, stride, N>(part, depth, from, rows(n), c + i * N + n, first, last, end.at(i, n));
      if constexpr (left != 0)
        columns<rest, (left > W ? 2 : 1), tail, a0, a1, stride, N>(
            part, depth, from, rows(whole), c + i * N + whole, first, last, end.at(i, whole));
    }
  }
}

// Most rows that are not zero have a nonzero value among their first elements.
template <long K>
inline bool is_zero(const float* a) {
  for (long k = 0; k < K; k += W) {
    const long left = K - k < W ? K - k : W; // the remaining lanes are zero
    if (Vec::loadu(a + k, left).zero_mask() != (1 << W) - 1) return false;
  }
  return true;
}

// The product of some rows of a. Each result is stored at the index of its row.
template <long M, long N, long K, long a0, long b0, long b1, class End>
inline void product_of_rows(const long* rows, long count, const float* a, const float* b, float* c, End end) {
  const long whole = (count + R - 1) / R * R;
  float *some_a = working_space(1, (M + R) * K), *some_c = working_space(2, (M + R) * N);
  for (long i = 0; i < count; i++) std::memcpy(some_a + i * K, a + rows[i] * a0, K * sizeof(float));
  std::memset(some_a + count * K, 0, (whole - count) * K * sizeof(float));
  all_columns<M / R * R, N, K, K, 1, b0, b1>(whole, K, some_a, b, some_c, Stored{});
  for (long i = 0; i < count; i++)
    for (long n = 0; n < N; n += W) {
      const long columns = N - n < W ? N - n : W;
      end(Vec::loadu(some_c + i * N + n, columns), rows[i], n, columns).store(c + rows[i] * N + n, columns);
    }
}

// Rows without any terms.
template <long N, class End>
inline void empty_rows(const long* rows, long count, float* c, End end) {
  for (long i = 0; i < count; i++)
    for (long n = 0; n < N; n += W) {
      const long columns = N - n < W ? N - n : W;
      end(Vec(0.0f), rows[i], n, columns).store(c + rows[i] * N + n, columns);
    }
}

// --- a matrix whose rows are nonzero in only one of several parts: the gradient of the outputs of the action taken ---

constexpr long MOST_ROWS = 1L << 16; // times parts: the row numbers are on the stack

// The rows with values in each part, and last the rows without any. `found` is false if a row has values in several
// parts.
template <long M, long Z, long parts, long g0>
struct RowsByPart {
  long rows[parts + 1][M], count[parts + 1] = {};
  bool found(const float* g) {
    for (long m = 0; m < M; m++) {
      long part = parts;
      for (long p = 0; p < parts; p++) {
        if (is_zero<Z>(g + m * g0 + p * Z)) continue;
        if (part != parts) return false;
        part = p;
      }
      rows[part][count[part]++] = m;
    }
    return true;
  }
};

// g b
template <long parts, long M, long N, long K, long a0, long b0, long b1, class End>
inline bool product_by_parts(const float* a, const float* b, float* c, End end) {
  constexpr long Z = K / parts;
  RowsByPart<M, Z, parts, a0> by_part;
  if (!by_part.found(a)) return false;
  for (long p = 0; p < parts; p++)
    if (by_part.count[p])
      product_of_rows<M, N, Z, a0, b0, b1>(by_part.rows[p], by_part.count[p], a + p * Z, b + p * Z * b0, c, end);
  empty_rows<N>(by_part.rows[parts], by_part.count[parts], c, end);
  return true;
}

// g^T b
template <long parts, long M, long N, long K, long a1, long b0>
inline bool transposed_by_parts(const float* a, const float* b, float* c) {
  constexpr long Z = M / parts;
  RowsByPart<K, Z, parts, a1> by_part;
  if (!by_part.found(a)) return false;
  float *some_a = working_space(1, K * Z), *some_b = working_space(2, K * N);
  for (long p = 0; p < parts; p++) {
    const long count = by_part.count[p];
    for (long i = 0; i < count; i++) {
      std::memcpy(some_a + i * Z, a + by_part.rows[p][i] * a1 + p * Z, Z * sizeof(float));
      std::memcpy(some_b + i * N, b + by_part.rows[p][i] * b0, N * sizeof(float));
    }
    if (count == 0) std::memset(c + p * Z * N, 0, Z * N * sizeof(float));
    all_columns<Z, N, K, 1, Z, N, 1>(Z, count, some_a, some_b, c + p * Z * N, Stored{});
  }
  return true;
}

// c[M, N] with contiguous rows, from a[M, K] with strides a0, a1 and b[K, N] with strides b0, b1, one of which is 1.
// `parts`: a, or its transpose, may be such a matrix.
template <long M, long N, long K, long a0, long a1, long b0, long b1, long parts = 1, class End = Stored>
inline void product(const float* a, const float* b, float* c, End end = {}) {
  if constexpr (M <= 4 && a1 == 1 && b0 == 1 && std::is_same_v<End, Stored>) {
    dots<M, N, K, a0, b1, N>(a, b, c);
    return;
  }
  if constexpr (parts > 1 && parts * M <= MOST_ROWS && a1 == 1 && K % parts == 0)
    if (product_by_parts<parts, M, N, K, a0, b0, b1>(a, b, c, end)) return;
  constexpr bool whole = M % parts == 0 && b1 == 1 && N % W == 0 && std::is_same_v<End, Stored>;
  if constexpr (parts > 1 && parts * K <= MOST_ROWS && a0 == 1 && whole)
    if (transposed_by_parts<parts, M, N, K, a1, b0>(a, b, c)) return;
  // Worth checking: the gradient may flow through only one of two critics.
  if constexpr (a1 == 1 && M * N * K >= 1L << 22 && M <= MOST_ROWS) {
    RowsByPart<M, K, 1, a0> by_part;
    by_part.found(a);
    if (4 * by_part.count[0] <= 3 * M) {
      product_of_rows<M, N, K, a0, b0, b1>(by_part.rows[0], by_part.count[0], a, b, c, end);
      empty_rows<N>(by_part.rows[1], by_part.count[1], c, end);
      return;
    }
  }
  all_columns<M, N, K, a0, a1, b0, b1>(M, K, a, b, c, end);
}

} // namespace rl_training
