// The ragged all-to-all: each rank writes slices of its operand into slices of other ranks'
// results. How many rows, from where and to where, are data on the device: `updates` for each rank.
//
// A call is one operation of group.h: its blocks send packets to all blocks of their number, so the
// argument there holds, and the call takes one epoch, whatever the sizes are. In that epoch each
// rank sends to each other rank
//   notices   for each update its rows and their places, to each block. A block keeps the updates
//             that it sends and those that it receives in a table of its own.
//   a stream  the packs of the updates, one after another; each update begins with a new pack. An
//             empty update has none.
// How long a stream is follows from the notices, so its two ranks know it. Other ranks need not.
//
// A stream is cut into windows. Behind the notices the epoch buffer has room for two windows, each
// with a slot for each source. Window w uses the room w % 2, and thread t of both ranks handles the
// same packs. Windows 0 and 1 are sent at once. Before it sends window w >= 2, a rank waits until
// the destination has read and armed window w - 2.
//
//   taken[d][b] in the header of rank s: block b of rank d stores w + 1 there when it has read and
//   armed window w of the stream from s, if that has a window w + 2. The barrier of the block and
//   the fence order the arming before the store. Who reads it: block b of rank s. Who clears it: s,
//   when the last value of the call has come. The next value can't come before: d stores it in a
//   later call, after it has taken a packet that s has sent in that call, behind the clearing.
//
//   Why nobody waits for ever: all ranks go through the same steps,
//     notices, Send 0, Send 1, hear the notices, Take 0, Send 2, Take 1, Send 3 ... end
//   and a rank with shorter streams has nothing to do in the last ones. Take w waits for Send w of
//   a peer, Send w + 2 for Take w, and the end for Takes: each for an earlier step. So of the
//   blocks of one number, that in the earliest step goes on.
//
// Where writes overlap, the last one counts, in the order of source and update. A rank knows all
// that is written into its result, so it stores of each pack the bytes that no later update writes.
// Each byte has one writer, and it does not matter what arrives first.
//
// Both ranks of a bad update find it by the same function, and treat it as empty. So the streams
// stay as told, and the call ends; no rank writes outside of its result.
//
// Model: tests/native/model/ragged_model.cc.
#pragma once

#include <string>

#include "same_operation.h"

namespace jax_intranode {

// The most updates of a rank, to all ranks together: a block's tables fit its shared memory.
constexpr int kMaxUpdates = 1024;

struct RaggedCall {
  const void* in;  // rows of the operand
  void* out;       // rows of the result; it has the values that are kept
  // For each rank and update, in this order. The first three: of what this rank sends.
  const int32_t *input_offsets, *send_sizes, *output_offsets, *recv_sizes;
  size_t row_bytes;
  uint32_t in_rows, out_rows;
  uint32_t updates;  // for each rank
  uint32_t window;   // packs of a window of a stream
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
  return static_cast<uint32_t>(packs < UINT32_MAX ? packs : UINT32_MAX);
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

// What a block knows of the updates that a rank sends and receives: for each rank and update.
template <int kMost>
struct RaggedTableOf {
  struct Updates {
    uint32_t row[kMost];   // its first row in the operand, or in the result
    uint32_t rows[kMost];  // 0: empty, or bad
    uint32_t end[kMost];   // the pack after its last one, in the stream between two ranks
  };
  Updates sent, received;
  bool covered[kMost];  // whether a later one overwrites a part of this received one
};
using RaggedTable = RaggedTableOf<kMaxUpdates>;

// Where rank `by` tells rank `of` how many windows its block has taken.
template <class G>
JIN_FN uint32_t* TakenOf(const G& g, int of, int by, int block) {
  return &reinterpret_cast<RegionHeader*>(g.region[of])->taken[by][block];
}

// Tells rank `to` that a block has taken `windows` windows, and that their room is empty again.
template <class G>
JIN_FN void TellTaken(const G& g, int to, int block, uint32_t windows) {
  Fence();
  Store(TakenOf(g, to, g.rank, block), windows);
}

// Whether rank `to` has taken so many windows.
template <class G>
JIN_FN bool HasTaken(const G& g, int to, int block, uint32_t windows) {
  return LoadAcquire(TakenOf(g, g.rank, to, block)) >= windows;
}

// Forgets what rank `to` has told: it tells no more in this call.
template <class G>
JIN_FN void ClearTaken(const G& g, int to, int block) {
  Store(TakenOf(g, g.rank, to, block), 0);
}

template <class Type, class PacketsOfType>
struct Ragged {
  using Packets = PacketsOfType;

  // Runs the call from step `*step` on. False: a wait was given up; the step may be resumed.
  template <class Thread, class G, class Table>
  JIN_FN static bool Run(Thread& t, const G& g, const RaggedCall& c, Table& table, uint32_t epoch,
                         uint32_t* step) {
    const Body<Thread, G, Table> body{t, g, c, table, epoch};
    for (;; ++*step) {
      bool done = true;
      switch (*step) {
        case 0:
          body.Announce();
          break;
        case 1:
        case 2:
          done = body.Send(*step - 1);
          break;
        case 3:
          done = body.Hear();
          break;
        case 4:
          body.CopyOwn();
          break;
        default: {
          const uint32_t w = (*step - 5) / 2;
          if (w >= body.Rounds()) return body.Finish();
          done = (*step - 5) % 2 == 0 ? body.Take(w) : body.Send(w + 2);
        }
      }
      if (!done) return false;
    }
  }

 private:
  template <class Thread, class G, class Table>
  struct Body {
    using Updates = typename Table::Updates;
    Thread& t;
    const G& g;
    const RaggedCall& c;
    Table& table;
    const uint32_t epoch;

    JIN_FN int Count() const { return g.size * static_cast<int>(c.updates); }
    // The packs of the stream to or from a rank, and its windows.
    JIN_FN uint32_t PacksWith(const Updates& of, int peer) const {
      return of.end[(peer + 1) * c.updates - 1];
    }
    JIN_FN uint32_t Windows(const Updates& of, int peer) const {
      const uint32_t packs = PacksWith(of, peer);
      return packs / c.window + (packs % c.window != 0);
    }
    JIN_FN uint32_t PacksInWindow(const Updates& of, int peer, uint32_t w) const {
      const uint32_t packs = PacksWith(of, peer);
      const size_t first = size_t{w} * c.window;
      if (first >= packs) return 0;
      return packs - first < c.window ? static_cast<uint32_t>(packs - first) : c.window;
    }
    JIN_FN char* Notices(int of_rank, int from) const {
      const size_t slot = SlotOf(from, of_rank) * t.Blocks() + t.Block();
      return g.EpochBuffer(of_rank, epoch) + slot * c.updates * FlaggedPackets::kBytes;
    }
    JIN_FN char* Window(int of_rank, int from, uint32_t w) const {
      const size_t slot = (w % 2) * (g.size - 1) + SlotOf(from, of_rank);
      return g.EpochBuffer(of_rank, epoch) + NoticeBytes(g.size, t.Blocks(), c.updates) +
             slot * c.window * Packets::kBytes;
    }

    // Calls `act(peer, j, unit)` for packs j < packs(peer) of this thread, of each other rank.
    // False: `act` gave up at `unit`, where this is resumed.
    template <class PacksOfPeer, class Act>
    JIN_FN bool ForEachPack(const PacksOfPeer& packs, const Act& act) const {
      const size_t first = t.First();
      size_t j = first & 0xFFFFFFFFu;
      for (int k = static_cast<int>(first >> 32); k < g.size - 1; ++k, j = t.First()) {
        const int peer = (g.rank + 1 + k) % g.size;
        const size_t count = packs(peer);
        for (; j < count; j += t.Stride()) {
          if (!act(peer, static_cast<uint32_t>(j), size_t(k) << 32 | j)) return false;
        }
      }
      return true;
    }

    // The update of a rank that pack i of its stream belongs to.
    JIN_FN int Find(const Updates& of, int peer, uint32_t i) const {
      int low = peer * c.updates, high = low + static_cast<int>(c.updates) - 1;
      while (low < high) {
        const int middle = (low + high) / 2;
        if (i < of.end[middle]) {
          high = middle;
        } else {
          low = middle + 1;
        }
      }
      return low;
    }
    // Where pack i of the stream begins: bytes after the first row of its update u, and its bytes.
    struct Place {
      int u;
      size_t at, bytes;
    };
    JIN_FN Place PlaceOf(const Updates& of, int peer, uint32_t i) const {
      const int u = Find(of, peer, i);
      const uint32_t begin = u % c.updates == 0 ? 0 : of.end[u - 1];
      const size_t at = size_t{i - begin} * sizeof(Pack), bytes = of.rows[u] * c.row_bytes;
      return {u, at, bytes - at < sizeof(Pack) ? bytes - at : sizeof(Pack)};
    }

    JIN_FN Pack LoadSent(int peer, uint32_t i) const {
      const Place p = PlaceOf(table.sent, peer, i);
      const char* const from =
          static_cast<const char*>(c.in) + table.sent.row[p.u] * c.row_bytes + p.at;
      return SendableOf<Type>(
          t, LoadInput(from, p.bytes, 0, (reinterpret_cast<uintptr_t>(from) & 15) == 0));
    }

    JIN_FN void StoreReceived(int peer, uint32_t i, const Pack& pack) const {
      const Place p = PlaceOf(table.received, peer, i);
      const size_t at = table.received.row[p.u] * c.row_bytes + p.at;
      char* const to = static_cast<char*>(c.out) + at;
      if (!table.covered[p.u]) {
        StoreOutput(to, p.bytes, 0, (reinterpret_cast<uintptr_t>(to) & 15) == 0, pack);
        return;
      }
      for (size_t k = 0; k < p.bytes; ++k) {
        if (IsLast(p.u, at + k)) {
          to[k] = static_cast<char>(pack.word[k / 4] >> (8 * (k % 4)));
        }
      }
    }
    // Whether no later update than u writes this byte of the result.
    JIN_FN bool IsLast(int u, size_t byte) const {
      const Updates& all = table.received;
      for (int v = u + 1; v < Count(); ++v) {
        const size_t begin = all.row[v] * c.row_bytes, end = begin + all.rows[v] * c.row_bytes;
        if (byte >= begin && byte < end) return false;
      }
      return true;
    }

    // Enters an update, sent or received, into a table.
    JIN_FN void Enter(Updates* to, int i, int source, int destination, int32_t rows, int32_t in_row,
                      int32_t out_row, int32_t received) const {
      const auto outside = [rows](int32_t first, uint32_t all) {
        return first < 0 || static_cast<uint32_t>(first) + static_cast<uint32_t>(rows) > all;
      };
      const bool bad =
          rows < 0 || (rows > 0 && (outside(in_row, c.in_rows) || outside(out_row, c.out_rows)));
      if (bad || rows != received) {
        t.Refuse(UpdateFault{source, destination, i % static_cast<int>(c.updates), rows, in_row,
                             out_row, received, c.in_rows, c.out_rows});
      }
      to->rows[i] = bad ? 0 : rows;
      to->row[i] = bad || rows == 0 ? 0 : (to == &table.sent ? in_row : out_row);
    }
    JIN_FN void Sum(Updates* of) const {
      t.Sync();
      for (int i = t.Thread(); i < Count(); i += t.Threads()) {
        uint32_t packs = 0;
        for (int u = i - i % static_cast<int>(c.updates); u <= i; ++u) {
          packs += static_cast<uint32_t>(PacksOf(of->rows[u] * c.row_bytes));
        }
        of->end[i] = packs;
      }
      t.Sync();
    }

    JIN_FN void Announce() const {
      for (int i = t.Thread(); i < Count(); i += t.Threads()) {
        const int32_t rows = c.send_sizes[i], in_row = c.input_offsets[i],
                      out_row = c.output_offsets[i];
        const int to = i / c.updates;
        t.Admit();
        if (to != g.rank) {
          const Pack notice{{static_cast<uint32_t>(rows), static_cast<uint32_t>(in_row),
                             static_cast<uint32_t>(out_row), 0}};
          FlaggedPackets::Put(Notices(to, g.rank), i % c.updates, notice);
        }
        Enter(&table.sent, i, g.rank, to, rows, in_row, out_row, rows);
        if (to == g.rank) {
          Enter(&table.received, i, g.rank, to, rows, in_row, out_row, c.recv_sizes[i]);
        }
      }
      Sum(&table.sent);
    }

    JIN_FN bool Hear() const {
      for (int i = t.FirstUpdate(); i < Count(); i += t.Threads()) {
        const int from = i / c.updates;
        if (from == g.rank) continue;
        Pack p;
        char* const notices = Notices(g.rank, from);
        while (!FlaggedPackets::TryGet(notices, i % c.updates, &p)) {
          if (!t.Wait(i, from)) return false;
        }
        FlaggedPackets::Arm(notices, i % c.updates);
        Enter(&table.received, i, from, g.rank, static_cast<int32_t>(p.word[0]),
              static_cast<int32_t>(p.word[1]), static_cast<int32_t>(p.word[2]), c.recv_sizes[i]);
      }
      Sum(&table.received);
      const Updates& all = table.received;
      for (int i = t.Thread(); i < Count(); i += t.Threads()) {
        table.covered[i] = false;
        for (int v = i + 1; v < Count(); ++v) {
          if (all.row[v] < all.row[i] + all.rows[i] && all.row[i] < all.row[v] + all.rows[v]) {
            table.covered[i] = true;
          }
        }
      }
      t.Sync();
      return true;
    }

    JIN_FN void CopyOwn() const {
      const uint32_t packs = PacksWith(table.sent, g.rank);
      for (size_t i = t.First(); i < packs; i += t.Stride()) {
        StoreReceived(g.rank, static_cast<uint32_t>(i), LoadSent(g.rank, static_cast<uint32_t>(i)));
      }
    }

    JIN_FN bool Send(uint32_t w) const {
      uint32_t has_room = 0;  // by rank
      return ForEachPack([&](int to) { return PacksInWindow(table.sent, to, w); },
                         [&](int to, uint32_t j, size_t unit) {
                           const Pack p = LoadSent(to, w * c.window + j);
                           while (w >= 2 && (has_room >> to & 1) == 0) {
                             if (HasTaken(g, to, t.Block(), w - 1)) {
                               has_room |= 1u << to;
                             } else if (!t.Wait(unit, to)) {
                               return false;
                             }
                           }
                           Packets::Put(Window(to, g.rank, w), j, p);
                           return true;
                         });
    }

    JIN_FN bool Take(uint32_t w) const {
      const bool done =
          ForEachPack([&](int from) { return PacksInWindow(table.received, from, w); },
                      [&](int from, uint32_t j, size_t unit) {
                        char* const window = Window(g.rank, from, w);
                        Pack p;
                        while (!Packets::TryGet(window, j, &p)) {
                          if (!t.Wait(unit, from)) return false;
                        }
                        Packets::Arm(window, j);
                        StoreReceived(from, w * c.window + j, p);
                        return true;
                      });
      if (!done) return false;
      t.Arrived();  // each window is waited for by itself
      t.Sync();     // every thread of the block has armed what it received
      for (int r = t.Thread(); r < g.size; r += t.Threads()) {
        if (r != g.rank && Windows(table.received, r) > w + 2) TellTaken(g, r, t.Block(), w + 1);
      }
      return true;
    }

    // The windows that this rank takes, and those that it sends after the first two.
    JIN_FN uint32_t Rounds() const {
      uint32_t rounds = 0;
      for (int r = 0; r < g.size; ++r) {
        if (r == g.rank) continue;
        const uint32_t taken = Windows(table.received, r), sent = Windows(table.sent, r);
        if (taken > rounds) rounds = taken;
        if (sent > rounds + 2) rounds = sent - 2;
      }
      return rounds;
    }

    JIN_FN bool Finish() const {
      for (int r = t.FirstUpdate(); r < g.size; r += t.Threads()) {
        const uint32_t windows = r == g.rank ? 0 : Windows(table.sent, r);
        if (windows <= 2) continue;
        while (!HasTaken(g, r, t.Block(), windows - 2)) {
          if (!t.Wait(r, r)) return false;
        }
        ClearTaken(g, r, t.Block());
      }
      return true;
    }
  };
};

}  // namespace jax_intranode
