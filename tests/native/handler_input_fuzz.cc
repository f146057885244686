// Calls the handlers of CPU devices with random attributes, shapes and dtypes, most of which no
// lowering writes. Every call must be refused, or give each byte of its results a value; all ranks
// must end alike.
//
//   handler_input_fuzz [rounds]
//
// Buffers have the sizes that they tell, so that AddressSanitizer finds what goes past them.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/native/fake_xla.h"
#include "xla_ffi/ffi/collectives_host.h"
#include "xla_ffi/ffi/communicator_host.h"
#include "xla_ffi/ffi/operands.h"

using namespace jax_intranode;

namespace {

constexpr size_t kEpochBufferBytes = 16 << 10;
constexpr unsigned char kUntouched = 0xEE;

std::mt19937 random_bits(1);
template <class... Choices>
int64_t Pick(Choices... choices) {
  const int64_t all[] = {static_cast<int64_t>(choices)...};
  return all[random_bits() % sizeof...(choices)];
}

// An array of exactly the bytes that its shape has.
struct Array {
  XLA_FFI_DataType type;
  std::vector<int64_t> dims;
  std::shared_ptr<unsigned char[]> data{};
  size_t bytes = 0;

  size_t ItemBytes() const { return ffi::ByteWidth(static_cast<ffi::DataType>(type)); }
  void Fill(unsigned char value) {
    bytes = ItemBytes();
    for (const int64_t d : dims) bytes *= d;
    data.reset(new unsigned char[bytes]);
    memset(data.get(), value, bytes);
  }
  // Whether an element has the value that all had before the call.
  bool IsUntouched() const {
    const std::vector<unsigned char> before(ItemBytes(), kUntouched);
    for (size_t at = 0; at < bytes; at += before.size()) {
      if (memcmp(data.get() + at, before.data(), before.size()) == 0) return true;
    }
    return false;
  }
};

Frame::Buffers BuffersOf(std::vector<Array>& arrays, unsigned char value) {
  Frame::Buffers buffers;
  for (Array& array : arrays) {
    array.Fill(value);
    buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, array.type, array.data.get(),
                       static_cast<int64_t>(array.dims.size()), array.dims.data()});
  }
  return buffers;
}

// The operands and results that an algorithm takes, of which one may then be damaged.
void MakeShapes(Algorithm algorithm, int n, std::vector<Array>* xs, std::vector<Array>* ys) {
  const auto type = static_cast<XLA_FFI_DataType>(
      Pick(XLA_FFI_DataType_F32, XLA_FFI_DataType_BF16, XLA_FFI_DataType_F64, XLA_FFI_DataType_S8,
           XLA_FFI_DataType_U64, XLA_FFI_DataType_PRED, XLA_FFI_DataType_C128,
           XLA_FFI_DataType_F8E4M3FN, XLA_FFI_DataType_TOKEN));
  const int64_t in = InputShards(algorithm, n), out = OutputShards(algorithm, n);
  if (IsNorm(algorithm)) {
    const int64_t rows = Pick(0, 1, 4), hidden = Pick(0, 1, 8, 39);
    *xs = {{type, {in * rows, hidden}}, {type, {rows, hidden}}, {type, {hidden}}};
    *ys = {{type, {rows, hidden}}, {type, {rows, hidden}}};
  } else {
    const int64_t many = IsAllReduce(algorithm) ? Pick(1, 2, 3) : 1;
    for (int64_t m = 0; m < many; ++m) {
      const int64_t length = Pick(0, 1, 7, 59);
      xs->push_back({type, {in, length}});
      ys->push_back({type, {out, length}});
    }
  }
  if (Pick(0, 1, 2) != 0) return;
  std::vector<Array>& some = Pick(0, 1) != 0 ? *xs : *ys;
  Array& one = some[random_bits() % some.size()];
  switch (Pick(0, 1, 2, 3)) {
    case 0:
      one.dims.push_back(Pick(0, 1, 2));
      break;
    case 1:
      one.dims.back() += 1;
      break;
    case 2:
      one.type = static_cast<XLA_FFI_DataType>(Pick(XLA_FFI_DataType_F32, XLA_FFI_DataType_S8));
      break;
    default:
      some.pop_back();
  }
}

// Also one element more or less on both sides, which the ranks can't divide.
void MakeUneven(std::vector<Array>* xs, std::vector<Array>* ys) {
  if (xs->size() != ys->size()) return;
  for (size_t i = 0; i < xs->size(); ++i) {
    for (Array* array : {&(*xs)[i], &(*ys)[i]}) {
      int64_t count = 1;
      for (const int64_t d : array->dims) count *= d;
      array->dims = {count + 1};
    }
  }
}

std::vector<int64_t> DevicesOf(int n) {
  return n == 2 ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{0, 1, 2};
}

struct Outcome {
  bool is_loaded = false;
  int failed = 0, ended = 0;  // ranks
  std::string error;
  bool untouched = false;
};

// One call of all ranks of the group of `n` devices.
Outcome CallAll(int n, int64_t size, int32_t algorithm, int32_t segments, std::string text,
                std::vector<Array>& xs, std::vector<Array>& ys) {
  std::vector<int64_t> ids = DevicesOf(n);
  float eps = 1e-5f, offset = 0;
  XLA_FFI_Array devices{XLA_FFI_DataType_S64, ids.size(), ids.data()};
  XLA_FFI_Scalar of_size{XLA_FFI_DataType_S64, &size},
      of_algorithm{XLA_FFI_DataType_S32, &algorithm}, of_segments{XLA_FFI_DataType_S32, &segments},
      of_eps{XLA_FFI_DataType_F32, &eps}, of_offset{XLA_FFI_DataType_F32, &offset};
  XLA_FFI_ByteSpan site{text.data(), text.size()};
  Frame frame;
  frame.attributes = {{"device_ids", {XLA_FFI_AttrType_ARRAY, &devices}},
                      {"group_size", {XLA_FFI_AttrType_SCALAR, &of_size}},
                      {"algorithm", {XLA_FFI_AttrType_SCALAR, &of_algorithm}},
                      {"segments", {XLA_FFI_AttrType_SCALAR, &of_segments}},
                      {"site", {XLA_FFI_AttrType_STRING, &site}},
                      {"eps", {XLA_FFI_AttrType_SCALAR, &of_eps}},
                      {"weight_offset", {XLA_FFI_AttrType_SCALAR, &of_offset}}};
  Outcome outcome;
  state = nullptr;
  outcome.error = frame.Run(&HostCollectiveInstantiate, XLA_FFI_ExecutionStage_INSTANTIATE);
  if (!outcome.error.empty()) return outcome;
  outcome.is_loaded = true;
  std::vector<std::vector<Array>> in(n), out(n);
  std::vector<XLA_FFI_Future*> futures;
  for (int r = 0; r < n; ++r) {
    for (const Array& x : xs) in[r].push_back({x.type, x.dims});
    for (const Array& y : ys) out[r].push_back({y.type, y.dims});
    device_of_call = r;
    frame.Run(&HostCollective, XLA_FFI_ExecutionStage_EXECUTE, BuffersOf(in[r], 1),
              BuffersOf(out[r], kUntouched));
    futures.push_back(frame.frame.future);
  }
  for (XLA_FFI_Future* future : futures) {
    for (int i = 0; i < 20000 && future->done == 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (future->done == 0) continue;
    (future->error.empty() ? outcome.ended : outcome.failed) += 1;
    if (!future->error.empty()) outcome.error = future->error;
  }
  for (const auto& results : out) {
    for (const Array& result : results) outcome.untouched |= result.IsUntouched();
  }
  return outcome;
}

#define CHECK(condition)                                                            \
  if (!(condition)) {                                                               \
    printf("%d: %s: round %d, algorithm %d\n", __LINE__, #condition, i, algorithm); \
    fflush(stdout);                                                                 \
    _Exit(1);                                                                       \
  }                                                                                 \
  static_assert(true)

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 2000;
  std::vector<std::vector<uint64_t>> memory;
  for (const int n : {2, 3}) {
    std::vector<uintptr_t> addresses;
    for (int r = 0; r < n; ++r) {
      auto& region = memory.emplace_back((kHeaderBytes + 2 * kEpochBufferBytes) / 8);
      std::fill(region.begin() + kHeaderBytes / 8, region.end(), ~uint64_t{0});
      addresses.push_back(reinterpret_cast<uintptr_t>(region.data()));
    }
    std::vector<GroupMember> members;
    for (int r = 0; r < n; ++r) members.push_back({r, 0, r, addresses, 0});
    CreateHostCommunicator({DevicesOf(n), n}, members, kEpochBufferBytes, 1000, nullptr, {});
  }
  constexpr int kCount = static_cast<int>(std::size(kAlgorithms));
  std::set<int> ran;  // algorithms
  for (int i = 0; i < rounds; ++i) {
    const int n = static_cast<int>(Pick(2, 3));
    int32_t algorithm = i % kCount;
    if (i % 40 == 0) algorithm = static_cast<int32_t>(Pick(-1, kCount, 99, INT32_MIN, INT32_MAX));
    const int64_t size = i % 40 == 1 ? Pick(0, 1, -1, -2, 4, INT64_MIN, INT64_MAX) : n;
    const auto segments = static_cast<int32_t>(Pick(1, 1, 1, 2, 4, 3, 0, -2, 64));
    const bool is_known = algorithm >= 0 && algorithm < kCount;
    std::vector<Array> xs, ys;
    MakeShapes(is_known ? static_cast<Algorithm>(algorithm) : Algorithm::kOneShot, n, &xs, &ys);
    if (Pick(0, 1, 2, 3, 4) == 0) MakeUneven(&xs, &ys);
    const Outcome outcome =
        CallAll(n, size, algorithm, segments, "program operation " + std::to_string(i), xs, ys);
    if (!is_known || size != n || IsMatmul(static_cast<Algorithm>(algorithm))) {
      CHECK(!outcome.is_loaded && outcome.error.rfind("jax_intranode: ", 0) == 0);
    }
    if (!outcome.is_loaded) continue;
    CHECK(outcome.ended + outcome.failed == n);
    CHECK(outcome.ended == 0 || outcome.failed == 0);
    CHECK(outcome.ended == 0 || !outcome.untouched);
    if (outcome.ended > 0) ran.insert(algorithm);
  }
  const int i = rounds, algorithm = 0;
  // No matmul, no hybrid cube mesh, no permute, which needs its sources, no ragged all-to-all,
  // which needs tables and the memory of an operand for its result, and neither operation of
  // experts, which needs a layout.
  CHECK(ran.size() == kCount - 8);
  printf("done\n");
  fflush(stdout);
  _Exit(0);  // threads of the groups go on
}
