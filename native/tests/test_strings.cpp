// xxHash64 against values of another implementation, at every kind of length, and strings in one buffer.

#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

#include "check.hpp"
#include "strings.hpp"

using namespace megalith;

namespace {

struct Vector {
  size_t length;
  uint64_t plain, seeded;
};

// Of the bytes 1, 8, 15, ... (mod 256): made by python-xxhash 4.1.0, with seed 0 and with kSeed.
constexpr uint64_t kSeed = 0x9e3779b97f4a7c15ull;
constexpr Vector kVectors[] = {
    {0, 0xef46db3751d8e999ull, 0xc4349fc93c010000ull},
    {1, 0x8a4127811b21e730ull, 0x32888f619f930a8full},
    {3, 0xb6e6c910c2fd373aull, 0xac68126d7acfce15ull},
    {4, 0x22eda2cf6af4c124ull, 0xd8d778ded6ee56b4ull},
    {7, 0x34084d91a233a751ull, 0x320e869c7a22c2baull},
    {8, 0xc6f1803a5e0b3222ull, 0x81c06e0c87ca2c12ull},
    {14, 0xff34ee32a5c9ecfeull, 0xabc4aac3e9f9721eull},
    {31, 0x6ab1c40e29f50073ull, 0x407e1b0246aa4c89ull},
    {32, 0x5a0756fbe9ecd3d1ull, 0x0fdbc75cbf63f5bdull},
    {33, 0xdc50cdc37bb9c183ull, 0x199870762697ae29ull},
    {64, 0x90083da9cdb9d795ull, 0x93205afc5df112b2ull},
    {100, 0xd248bfc5208b0b16ull, 0x8d818c65ab873d61ull},
};

// In a buffer that ends where the string ends, so that the sanitizer sees a read beyond it.
void published_values() {
  for (size_t shift : {0, 1, 5}) {
    for (const Vector& vector : kVectors) {
      const std::unique_ptr<unsigned char[]> bytes(new unsigned char[shift + vector.length]);
      for (size_t i = 0; i < vector.length; ++i)
        bytes[shift + i] = static_cast<unsigned char>(i * 7 + 1);
      CHECK(xxhash64(bytes.get() + shift, vector.length, 0) == vector.plain);
      CHECK(xxhash64(bytes.get() + shift, vector.length, kSeed) == vector.seeded);
    }
  }
}

void strings_in_one_buffer() {
  const char* text = "..auser:42";
  const std::vector<int64_t> offsets = {2, 3, 3, 10};
  std::vector<int64_t> out(3);
  hash_strings(text, offsets.data(), 3, 0, out.data());
  CHECK(static_cast<uint64_t>(out[0]) == 0xd24ec4f1a98c6e5bull);
  CHECK(static_cast<uint64_t>(out[1]) == 0xef46db3751d8e999ull);
  CHECK(static_cast<uint64_t>(out[2]) == 0xdc1fea7da8d2d1c2ull);
}

void nothing_at_all() {
  const int64_t offsets[] = {0, 0};
  int64_t out = 7;
  hash_strings(nullptr, offsets, 0, 0, &out);
  CHECK(out == 7);
  hash_strings(nullptr, offsets, 1, 0, &out);
  CHECK(static_cast<uint64_t>(out) == 0xef46db3751d8e999ull);
}

}  // namespace

int main() {
  published_values();
  strings_in_one_buffer();
  nothing_at_all();
  std::puts("strings ok");
}
