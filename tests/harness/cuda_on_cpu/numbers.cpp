// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of a thread with all numbers that it can meet, or, given a step above 1, with each so-many-th: scales
// beside the reference's, with reciprocals that are off; conversions beside the processor's (F16C) and integers'.

#include <immintrin.h>

#include <cstdio>
#include <cstdlib>

#include "cuda_block.h"

extern "C" void cuda_on_cpu_set(int, int, int, int, int);

namespace {

constexpr int kMostUlps = 8;  // PTX allows rcp.approx 1
constexpr int64_t kShown = 20;

int64_t wrong = 0;

void expect(const char* what, uint32_t of, uint32_t got, uint32_t expected) {
  if (got == expected) return;
  if (++wrong <= kShown) std::printf("%s of %08x: expected %08x, got %08x\n", what, of, expected, got);
}

void say(const char* what) {
  std::printf("%s: %lld wrong\n", what, static_cast<long long>(wrong));
  std::fflush(stdout);
}

void set_reciprocals(int ulps) { cuda_on_cpu_set(0, 0, 0, ulps, 1); }

// Each magnitude that a block of numbers may have.
template <int kBits>
void try_magnitudes(uint64_t step) {
  for (uint64_t at = 0; at < 0x80000000u; at += step) {
    const uint32_t most = static_cast<uint32_t>(at);
    const loco::Scale exact = loco::scale_of<kBits>(most), quick = loco::quick_scale_of<kBits>(most);
    expect("stored scale", most, quick.stored, exact.stored);
    expect("finite", most, quick.finite, exact.finite);
    if (!exact.finite) continue;
    expect("step", most, loco::as_bits(quick.step), loco::as_bits(exact.step));
    expect("inverse", most, loco::as_bits(quick.inverse), loco::as_bits(exact.inverse));
    const float integer = loco::on_grid(loco::as_float(most), quick.inverse) - loco::kRounding;
    expect("integer within its bits", most, integer <= loco::kLargest<kBits>, true);
  }
}

// Each step that a scale can stand for.
template <int kBits>
void try_reciprocals() {
  for (int ulps = -kMostUlps; ulps <= kMostUlps; ++ulps) {
    set_reciprocals(ulps);
    for (uint32_t high = 0x80; high < 0x7f80; ++high) {
      const uint32_t most = loco::as_bits(loco::as_float(high << 16) * loco::kLargest<kBits>);
      const loco::Scale exact = loco::scale_of<kBits>(most);
      if (!exact.finite || exact.step == 0.0f) continue;
      expect("step that a scale reaches", high << 16, loco::as_bits(exact.step), high << 16);
      const loco::Scale quick = loco::quick_scale_of<kBits>(most);
      expect("inverse by a reciprocal that is off", most, loco::as_bits(quick.inverse), loco::as_bits(exact.inverse));
      expect("scale by a reciprocal that is off", most, quick.stored, exact.stored);
    }
  }
  set_reciprocals(0);
}

uint32_t half_of(float value, uint32_t bits, bool nan) {
  return nan ? (bits >> 16 & 0x8000u) | 0x7e00u : _cvtss_sh(value, 0);
}

uint32_t bfloat16_of(uint32_t bits, bool nan) { return nan ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16; }

// Each float to 16 bits.
void try_stores(uint64_t step) {
  constexpr int kRun = 8;
  for (uint64_t first = 0; first < 1ull << 32; first += kRun * step) {
    float values[kRun];
    for (int i = 0; i < kRun; ++i) values[i] = loco::as_float(static_cast<uint32_t>(first + i));
    const auto halves = loco::run_of<loco::Type::kHalf>(values);
    const auto brains = loco::run_of<loco::Type::kBFloat16>(values);
    for (int i = 0; i < kRun; ++i) {
      const uint32_t bits = static_cast<uint32_t>(first + i);
      const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
      const int word = i / 2, shift = i % 2 * 16;
      expect("half", bits, halves.words[word] >> shift & 0xffffu, half_of(values[i], bits, nan));
      expect("bfloat16", bits, brains.words[word] >> shift & 0xffffu, bfloat16_of(bits, nan));
    }
  }
}

// Each number of 16 bits to a float.
void try_loads() {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    loco::Run<uint16_t> run{};
    run.words[0] = bits | (65535 - bits) << 16;
    for (int i = 0; i < 2; ++i) {
      const uint32_t own = i ? 65535 - bits : bits;
      const float half = loco::number<loco::Type::kHalf>(run, i), expected = _cvtsh_ss(static_cast<uint16_t>(own));
      const bool both_nan = half != half && expected != expected;
      if (!both_nan) expect("load of half", own, loco::as_bits(half), loco::as_bits(expected));
      const float brain = loco::number<loco::Type::kBFloat16>(run, i);
      expect("load of bfloat16", own, loco::as_bits(brain), own << 16);
    }
  }
}

// Each integer of 8 bits to a float and back.
void try_bytes() {
  for (int byte = -128; byte < 128; ++byte) {
    loco::Run<uint8_t> run{};
    run.words[0] = run.words[1] = 0x01010101u * static_cast<uint8_t>(byte);
    float integers[8], grid[8];
    loco::spread_bytes(run, integers);
    for (int i = 0; i < 8; ++i) {
      expect("byte", byte, loco::as_bits(integers[i]), loco::as_bits(static_cast<float>(byte)));
      grid[i] = loco::kRounding + static_cast<float>(i % 2 ? byte : -byte);
    }
    const auto back = loco::lowest_bytes(grid);
    for (int i = 0; i < 8; ++i) {
      const uint8_t expected = static_cast<uint8_t>(i % 2 ? byte : -byte);
      expect("lowest byte", byte, back.words[i / 4] >> (i % 4 * 8) & 0xffu, expected);
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  const uint64_t step = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1;
  try_reciprocals<4>();
  try_reciprocals<8>();
  say("steps with reciprocals that are off by up to 8 units in the last place");
  try_loads();
  try_bytes();
  say("loads");
  try_magnitudes<4>(step);
  try_magnitudes<8>(step);
  say("magnitudes");
  try_stores(step);
  say("stores");
  return wrong != 0;
}
