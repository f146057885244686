// What a rank is asked to do in a ragged all-to-all, and an update that it can't do.
#pragma once

#include <string>

#include "packets.h"

namespace jax_intranode {

// The most updates of a rank, to all ranks together: a block's tables fit its shared memory.
constexpr int kMaxUpdates = 1024;

struct RaggedCall {
  const void* in;  // rows of the operand
  void* out;       // rows of the result; it has the values that are kept
  // For each rank and update, in this order. The first three: of what this rank sends.
  const int32_t *input_offsets, *send_sizes, *output_offsets, *recv_sizes;
  uint32_t row_bytes;
  uint32_t in_rows, out_rows;
  uint32_t updates;            // for each rank
  uint32_t window;             // packs of a window of a stream
  const void* kept = nullptr;  // the values that the result keeps, if it does not have them yet

  size_t OutBytes() const { return size_t{out_rows} * row_bytes; }
};

// Bytes of an epoch buffer that notices take, and packs of a window behind them (0: no room).
JIN_HOST_FN size_t NoticeBytes(int size, int blocks, uint32_t updates) {
  return size_t{FlaggedPackets::kBytes} * (size - 1) * blocks * updates;
}
inline uint32_t RaggedWindow(size_t epoch_buffer_bytes, int size, int blocks, uint32_t updates,
                             size_t packet_bytes) {
  const size_t notices = NoticeBytes(size, blocks, updates);
  if (notices >= epoch_buffer_bytes) return 0;
  const size_t packs = (epoch_buffer_bytes - notices) / (2 * (size - 1) * packet_bytes);
  return static_cast<uint32_t>(packs < INT32_MAX / 2 ? packs : INT32_MAX / 2);
}

// An update that can't be done.
struct UpdateFault {
  int32_t source, destination, update;
  int32_t rows, in_row, out_row;
  int32_t received;  // what the destination expects: its element of recv_sizes
  uint32_t in_rows, out_rows;
};

inline std::string TextOf(const UpdateFault& f) {
  const auto number = [](auto v) { return std::to_string(v); };
  const std::string text = "update " + number(f.update) + " from rank " + number(f.source) +
                           " to rank " + number(f.destination) + " has " + number(f.rows) +
                           " rows from row " + number(f.in_row) + " of an operand with " +
                           number(f.in_rows) + " rows to row " + number(f.out_row) +
                           " of an output with " + number(f.out_rows) + " rows";
  if (f.received == f.rows) return text;
  return text + ", and recv_sizes of rank " + number(f.destination) + " says " +
         number(f.received) + " rows";
}

}  // namespace jax_intranode
