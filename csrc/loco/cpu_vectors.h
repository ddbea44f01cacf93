// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// The vectors of the CPU kernels: loads, stores, and conversions between types. The first part of cpu_kernels.h,
// included by it alone, once for each instruction set: LOCO_LOCAL and LOCO_SET are defined there.

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Integers __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef int8_t SignedBytes __attribute__((vector_size(16)));

constexpr int kLanes = 16;

template <typename Vector>
LOCO_LOCAL Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

template <typename Vector>
LOCO_LOCAL void store(void* to, Vector vector) {
  std::memcpy(to, &vector, sizeof(vector));
}

// Between 8, 16 and 32 bits, and the largest lane: what compilers do lane by lane if not told.
#if LOCO_SET == 512
LOCO_LOCAL Words widened(Halves halves) { return (Words)_mm512_cvtepu16_epi32((__m256i)halves); }
LOCO_LOCAL Integers widened(SignedBytes bytes) { return (Integers)_mm512_cvtepi8_epi32((__m128i)bytes); }
LOCO_LOCAL Halves narrowed(Words words) { return (Halves)_mm512_cvtepi32_epi16((__m512i)words); }
LOCO_LOCAL Bytes lowest_bytes(Words words) { return (Bytes)_mm512_cvtepi32_epi8((__m512i)words); }
LOCO_LOCAL uint32_t largest_of(Integers lanes) { return _mm512_reduce_max_epi32((__m512i)lanes); }
#elif LOCO_SET == 256
LOCO_LOCAL void split(Words words, __m256i* low, __m256i* high) {
  std::memcpy(low, &words, sizeof(*low));
  std::memcpy(high, reinterpret_cast<const char*>(&words) + sizeof(*low), sizeof(*high));
}
template <typename Vector>
LOCO_LOCAL Vector joined(__m256i low, __m256i high) {
  Vector vector;
  std::memcpy(&vector, &low, sizeof(low));
  std::memcpy(reinterpret_cast<char*>(&vector) + sizeof(low), &high, sizeof(high));
  return vector;
}
LOCO_LOCAL Words widened(Halves halves) {
  const __m256i all = (__m256i)halves;
  return joined<Words>(
      _mm256_cvtepu16_epi32(_mm256_castsi256_si128(all)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(all, 1)));
}
LOCO_LOCAL Integers widened(SignedBytes bytes) {
  const __m128i all = (__m128i)bytes;
  return joined<Integers>(_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_srli_si128(all, 8)));
}
LOCO_LOCAL Halves narrowed(Words words) {
  __m256i low, high;
  split(words & 0xffffu, &low, &high);
  return (Halves)_mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
}
LOCO_LOCAL Bytes lowest_bytes(Words words) {
  const __m256i halves = (__m256i)narrowed(words & 0xffu);
  return (Bytes)_mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}
LOCO_LOCAL uint32_t largest_of(Integers lanes) {
  __m256i low, high;
  split((Words)lanes, &low, &high);
  const __m256i eight = _mm256_max_epi32(low, high);
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1))));
}
#else
LOCO_LOCAL Words widened(Halves halves) { return __builtin_convertvector(halves, Words); }
LOCO_LOCAL Integers widened(SignedBytes bytes) { return __builtin_convertvector(bytes, Integers); }
LOCO_LOCAL Halves narrowed(Words words) { return __builtin_convertvector(words, Halves); }
LOCO_LOCAL Bytes lowest_bytes(Words words) { return __builtin_convertvector(words, Bytes); }
LOCO_LOCAL uint32_t largest_of(Integers lanes) {
  int32_t most = lanes[0];
  for (int i = 1; i < kLanes; ++i) most = lanes[i] > most ? lanes[i] : most;
  return static_cast<uint32_t>(most);
}
#endif

LOCO_LOCAL Floats bfloat16s_to_floats(Halves halves) { return reinterpret_cast<Floats>(widened(halves) << 16); }

// Half by its bits: an exponent of half is 112 less than a float's; below its smallest one, subtracting the implicit
// bit normalizes.
LOCO_LOCAL Floats halves_to_floats(Halves halves) {
  const Words bits = widened(halves);
  const Words sign = (bits & 0x8000u) << 16, magnitude = (bits & 0x7fffu) << 13;
  const Floats normal = reinterpret_cast<Floats>(magnitude + (112u << 23));
  const Floats subnormal = reinterpret_cast<Floats>(magnitude + (113u << 23)) - as_float(113u << 23);
  const Floats not_finite = reinterpret_cast<Floats>(magnitude | kInfinity);
  const Integers signed_magnitude = reinterpret_cast<Integers>(magnitude);
  const Floats large = signed_magnitude >= (31 << 23) ? not_finite : normal;
  const Floats value = signed_magnitude < (1 << 23) ? subnormal : large;
  return reinterpret_cast<Floats>(reinterpret_cast<Words>(value) | sign);
}

LOCO_LOCAL Halves floats_to_bfloat16s(Floats values) {
  const Words bits = reinterpret_cast<Words>(values);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Integers magnitude = reinterpret_cast<Integers>(bits & kMagnitude);
  const Words quiet = Words{} + static_cast<uint32_t>(kScaleOfNotFinite);
  return narrowed(magnitude > static_cast<int32_t>(kInfinity) ? quiet : rounded);
}

// Rounded half to even. Adding 0.5 leaves units of half's subnormals, 2^-24, in the lowest bits.
LOCO_LOCAL Halves floats_to_halves(Floats values) {
  const Words bits = reinterpret_cast<Words>(values), magnitude = bits & kMagnitude;
  const Words normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const Words subnormal =
      reinterpret_cast<Words>(reinterpret_cast<Floats>(magnitude) + 0.5f) - static_cast<uint32_t>(0x3f000000u);
  const Integers compared = reinterpret_cast<Integers>(magnitude);
  const Words nan = Words{} + 0x7e00u, infinite = Words{} + 0x7c00u;
  const Words large = compared > static_cast<int32_t>(kInfinity) ? nan : infinite;
  const Words finite = compared < (113 << 23) ? subnormal : normal;
  return narrowed((compared >= 0x477ff000 ? large : finite) | ((bits >> 16) & 0x8000u));
}

// Storage of gradients and results.
template <Type kType>
using Element = std::conditional_t<kType == Type::kFloat, float, uint16_t>;

template <Type kType>
LOCO_LOCAL Floats load_floats(const Element<kType>* from) {
  if constexpr (kType == Type::kFloat) {
    return load<Floats>(from);
  } else if constexpr (kType == Type::kBFloat16) {
    return bfloat16s_to_floats(load<Halves>(from));
  } else {
    return halves_to_floats(load<Halves>(from));
  }
}

template <Type kType>
LOCO_LOCAL void store_floats(Element<kType>* to, Floats values) {
  if constexpr (kType == Type::kFloat) {
    store(to, values);
  } else if constexpr (kType == Type::kBFloat16) {
    store(to, floats_to_bfloat16s(values));
  } else {
    store(to, floats_to_halves(values));
  }
}
