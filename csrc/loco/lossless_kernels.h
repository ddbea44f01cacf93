// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
//
// The CPU kernels of lossless updates. Like cpu_kernels.h, this file is included once for each instruction set, which
// LOCO_TARGET names. Compilers vectorize the loops over all elements; elements with a nibble are visited by the bits of
// a mask.

#define LOCO_LOCAL inline __attribute__((always_inline)) LOCO_TARGET

// Elements of a tile, padded with zeros after the end of its row; `filled` has room for them.
LOCO_LOCAL const uint16_t* elements_of(const uint16_t* row, int64_t width, int64_t tile, uint16_t* filled) {
  const int64_t first = tile * kTile, left = width - first;
  if (left >= kTile) return row + first;
  std::memset(filled, 0, kTile * sizeof(filled[0]));
  std::memcpy(filled, row + first, left * sizeof(filled[0]));
  return filled;
}

LOCO_TARGET void measure_tiles(const Pack& shared, int64_t begin, int64_t end) {
  const Pack job = shared;  // a copy that nothing can point to, and change
  uint16_t filled[2][kTile];
  for (int64_t tile = begin; tile < end; ++tile) {
    const uint16_t* updated = elements_of(job.updated, job.width, tile, filled[0]);
    const uint16_t* held = elements_of(job.held, job.width, tile, filled[1]);
    uint16_t changed = 0, large = 0, far = 0, larger = 0;  // as wide as elements: a vector then has a lane for each
    for (int i = 0; i < kTile; ++i) {
      const int16_t d = difference_of(updated[i], held[i]);
      changed += is_picked<false>(d);
      large += is_outside(d, kLowest, kHighest<false>);
      far += is_picked<true>(d);
      larger += is_outside(d, kLowest, kHighest<true>);
    }
    job.measured[tile] = best_of({changed, large, far, larger});
  }
}

// The elements of a tile that have nibbles, in order, by the bitmap or the pairs of its section; returns how many.
template <bool kInPairs>
LOCO_LOCAL int positions_of(const uint16_t* section, uint16_t* positions) {
  constexpr int kEach = kInPairs ? 32 : 64;  // elements in a word
  int count = 0;
  for (int i = 0; i < kTile / kEach; ++i) {
    uint64_t word;
    std::memcpy(&word, section + i * 4, sizeof(word));
    if (kInPairs) word = (word >> 1) & ~word & 0x5555555555555555u;
    for (; word != 0; word &= word - 1) {
      positions[count++] = static_cast<uint16_t>(i * kEach + __builtin_ctzll(word) / (64 / kEach));
    }
  }
  return count;
}

// Write the bitmap or the pairs of differences.
template <bool kInPairs>
LOCO_LOCAL void write_codes(const int16_t* d, uint8_t* to) {
  uint8_t codes[kTile];
  for (int i = 0; i < kTile; ++i) {
    codes[i] = static_cast<uint8_t>(kInPairs ? (is_picked<true>(d[i]) ? 2 : d[i] & 3) : is_picked<false>(d[i]));
  }
  for (int i = 0; i < kTile / 8; ++i) {
    uint64_t eight;
    std::memcpy(&eight, codes + i * 8, sizeof(eight));
    if (kInPairs) {
      eight = (eight | eight >> 6) & 0x000f000f000f000fu;
      eight = (eight | eight >> 12) & 0x000000ff000000ffu;
      const uint16_t unit = static_cast<uint16_t>(eight | eight >> 24);
      std::memcpy(to + i * 2, &unit, sizeof(unit));
    } else {
      to[i] = static_cast<uint8_t>(eight * 0x0102040810204080u >> 56);  // byte k times 2^(56 - 7 k) is bit 56 + k
    }
  }
}

// Write a section of at most kMostUnits, and return its size.
template <bool kInPairs>
LOCO_LOCAL int write_section(const int16_t* d, uint16_t* section) {
  uint16_t positions[kTile], escapes[kTile + 1];
  uint8_t all[kTile], nibbles[kTile + 4];
  for (int i = 0; i < kTile; ++i) all[i] = static_cast<uint8_t>(nibble_of<kInPairs>(d[i]));
  write_codes<kInPairs>(d, reinterpret_cast<uint8_t*>(section));
  const int count = positions_of<kInPairs>(section, positions);
  int escaped = 0;
  for (int k = 0; k < count; ++k) {
    const int position = positions[k];
    nibbles[k] = all[position];
    escapes[escaped] = static_cast<uint16_t>(d[position]);  // if it is no escape, the next one overwrites it
    escaped += all[position] == kEscape;
  }
  std::memset(nibbles + count, 0, 4);
  uint16_t* to = section + kBaseUnits<kInPairs>;
  for (int i = 0; i < nibble_units(count); ++i) {
    const uint8_t* four = nibbles + i * 4;
    to[i] = static_cast<uint16_t>(four[0] | four[1] << 4 | four[2] << 8 | four[3] << 12);
  }
  to += nibble_units(count);
  std::memcpy(to, escapes, escaped * sizeof(escapes[0]));
  return static_cast<int>(to - section) + escaped;
}

LOCO_TARGET void pack_tiles(const Pack& shared, int64_t begin, int64_t end) {
  const Pack job = shared;
  uint16_t filled[2][kTile], section[kMostUnits];
  int16_t d[kTile];
  std::memcpy(job.wire + 2 * begin, job.header + begin, (end - begin) * sizeof(job.header[0]));
  for (int64_t tile = begin; tile < end; ++tile) {
    const uint16_t* updated = elements_of(job.updated, job.width, tile, filled[0]);
    const uint16_t* held = elements_of(job.held, job.width, tile, filled[1]);
    const uint32_t mode = job.header[tile] >> 30;
    const int64_t first = 2 * job.tiles + (job.header[tile] & kOffset);
    const uint16_t* from = section;
    int64_t size = 0;
    if (mode == kPlain) {
      from = updated;
      size = kPlainUnits;
    } else if (mode != kSame) {
      for (int i = 0; i < kTile; ++i) d[i] = difference_of(updated[i], held[i]);
      size = mode == kPairs ? write_section<true>(d, section) : write_section<false>(d, section);
    }
    const bool fits = first + size <= job.units;
    if (fits) std::memcpy(job.wire + first, from, size * sizeof(from[0]));
    const int64_t behind = fits ? first + size : first;
    if ((!fits || tile + 1 == job.tiles) && behind < job.units) {
      std::memset(job.wire + behind, 0, (job.units - behind) * sizeof(job.wire[0]));
    }
  }
}

// The differences of the four elements of each byte of pairs; those that have nibbles are left open.
struct NearPairs {
  int16_t numbers[256][4];

  constexpr NearPairs() : numbers() {
    for (int byte = 0; byte < 256; ++byte) {
      for (int i = 0; i < 4; ++i) {
        const int code = byte >> (2 * i) & 3;
        numbers[byte][i] = static_cast<int16_t>(code == 3 ? -1 : code & 1);
      }
    }
  }
};

constexpr NearPairs kNearPairs;

template <bool kInPairs>
struct Nibbles {
  uint16_t numbers[16];

  constexpr Nibbles() : numbers() {
    for (int nibble = 0; nibble < 16; ++nibble) {
      const int number = nibble >= 8 ? nibble - 16 : nibble;
      numbers[nibble] = static_cast<uint16_t>(kInPairs && nibble < 2 ? nibble + 8 : nibble == 0 ? -1 : number);
    }
  }
};

template <bool kInPairs>
constexpr Nibbles<kInPairs> kNibbles;

// The differences of a section in `room` units; returns whether it fits into them.
template <bool kInPairs>
LOCO_LOCAL bool read_section(const uint16_t* section, int64_t room, int16_t* d) {
  if (room < kBaseUnits<kInPairs>) return false;
  uint16_t positions[kTile];
  const int count = positions_of<kInPairs>(section, positions);
  if (room < kBaseUnits<kInPairs> + nibble_units(count)) return false;
  uint8_t nibbles[kTile];
  const uint8_t* packed = reinterpret_cast<const uint8_t*>(section + kBaseUnits<kInPairs>);
  const uint16_t* escapes = section + kBaseUnits<kInPairs> + nibble_units(count);
  uint16_t escaped = 0;
  for (int i = 0; i < nibble_units(count) * 2; ++i) {
    nibbles[2 * i] = packed[i] & 15;
    nibbles[2 * i + 1] = packed[i] >> 4;
  }
  for (int k = 0; k < count; ++k) escaped += nibbles[k] == kEscape;
  if (escapes + escaped > section + room) return false;
  if (kInPairs) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(section);
    for (int i = 0; i < kTile / 4; ++i) std::memcpy(d + i * 4, kNearPairs.numbers[bytes[i]], 4 * sizeof(d[0]));
  } else {
    std::memset(d, 0, kTile * sizeof(d[0]));
  }
  for (int k = 0; k < count; ++k) {  // no branch, since none could be predicted
    const bool escape = nibbles[k] == kEscape;
    const uint16_t* number = escape ? escapes : kNibbles<kInPairs>.numbers + nibbles[k];
    d[positions[k]] = static_cast<int16_t>(*number);
    escapes += escape;
  }
  return true;
}

LOCO_TARGET void apply_tiles(const Apply& shared, int64_t begin, int64_t end) {
  const Apply job = shared;
  int16_t d[kTile];
  for (int64_t all = begin; all < end; ++all) {
    const int64_t row = all / job.tiles, tile = all % job.tiles;
    const uint16_t* wire = job.wire + row * job.units;
    uint32_t word;
    std::memcpy(&word, wire + 2 * tile, sizeof(word));
    const uint32_t mode = word >> 30;
    const int64_t first = 2 * job.tiles + (word & kOffset), room = job.units - first;
    uint16_t* held = job.held + row * job.held_stride + tile * kTile;
    const int64_t left = job.width - tile * kTile;
    const int count = left < kTile ? static_cast<int>(left) : kTile;
    if (mode == kSame) continue;
    if (mode == kPlain) {
      if (room >= kPlainUnits) std::memcpy(held, wire + first, count * sizeof(held[0]));
      continue;
    }
    const bool fits = mode == kPairs ? read_section<true>(wire + first, room, d)
                                     : read_section<false>(wire + first, room, d);
    if (!fits) continue;
    for (int i = 0; i < count; ++i) {
      held[i] = ordinal(static_cast<uint16_t>(ordinal(held[i]) + static_cast<uint16_t>(d[i])));
    }
  }
}

#undef LOCO_LOCAL
#undef LOCO_TARGET
