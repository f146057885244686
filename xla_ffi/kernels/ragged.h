// The ragged all-to-all: each rank writes slices of its operand into slices of other ranks'
// results. How many rows, from where and to where, are data on the device: `updates` for each rank.
//
// A call is one operation of group.h: its blocks send packets to all blocks of their number, so the
// argument there holds, and the call takes one epoch, whatever the sizes are. In that epoch each
// rank sends to each other rank
//   notices   for each update its rows, their places and its end in the stream, to each block. A
//             block keeps the updates that it sends and those that it receives in a table of its
//             own.
//   a stream  the packs of the updates, one after another; each update begins with a new pack. An
//             empty update has none.
// How long a stream is follows from the notices, so its two ranks know it. Other ranks need not.
//
// A stream is cut into windows. Behind the notices the epoch buffer has room for two windows, each
// with a slot for each source. Window w uses the room w % 2, and thread t of both ranks handles the
// same packs. Before it sends a pack of window w >= 2, a rank waits until the destination has read
// and armed window w - 2.
//
//   taken[d][b] in the header of rank s: block b of rank d stores w + 1 there when it has read and
//   armed window w of the stream from s, if that has a window w + 2. The barrier of the block and
//   the fence order the arming before the store. Who reads it: block b of rank s. Who clears it: s,
//   when the last value of the call has come. The next value can't come before: d stores it in a
//   later call, after it has taken a packet that s has sent in that call, behind the clearing.
//
//   Why nobody waits for ever: all ranks send their notices and the first `ahead` packs of each
//   stream, hear the notices, and then go through the places i of all streams, in which they send
//   pack i + ahead and take pack i. A rank with shorter streams has nothing to do at the last ones.
//   Taking pack i waits for its sending, at place i - ahead of a peer. Sending pack i + ahead waits
//   for the taking of the window before the last one, at places of a peer before i, because `ahead`
//   is at most a window. So of the blocks of one number, that at the earliest place goes on.
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

#include "buffers.h"
#include "ragged_call.h"
#include "same_operation.h"

namespace jax_intranode {

// Of so many updates for a rank, or received ones, a thread goes through all.
constexpr int kSummed = 8, kCompared = 16;

// What a block knows of the updates that a rank sends and receives: for each rank and update.
template <int kMost>
struct RaggedTableOf {
  struct alignas(8) Rows {
    uint32_t begin, end;  // equal: it is empty, or bad
  };
  struct Updates {
    Rows rows[kMost];       // in the operand, or in the result
    uint32_t packs[kMost];  // of a received one, before it is heard of: the rows that are expected
    uint32_t end[kMost];    // the pack after its last one, in the stream between two ranks
  };
  Updates sent, received;
  bool covered[kMost];                         // a later one overwrites a part of this received one
  uint32_t sums[kMost / kSummed + kMaxRanks];  // packs of so many updates for a rank
  uint32_t unordered[2];                       // whether places of received ones do not ascend
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

// N, K: the ranks and the updates for each, where they are known when compiling, or 0.
template <class Type, class PacketsOfType, int N = 0, uint32_t K = 0>
struct Ragged {
  using Packets = PacketsOfType;

  // Runs the call from step `*step` on. False: a wait was given up; the step may be resumed.
  template <class Thread, class G, class Table>
  JIN_FN static bool Run(Thread& t, const G& g, const RaggedCall& c, Table& table, uint32_t epoch,
                         uint32_t* step) {
    const auto stride = static_cast<uint32_t>(t.Stride());
    // Each thread has the same places in all windows.
    const uint32_t window = c.window > stride ? c.window - c.window % stride : c.window;
    // On CPU devices a rank that waits gives up its thread: it sends all that there is room for.
    const uint32_t ahead = window < stride || stride == 1 ? window : stride;
    const Body<Thread, G, Table> body{t, g, c, table, epoch, window, ahead};
    uint32_t places = *step > 2 ? body.Places() : 0;
    for (;; ++*step) {
      bool done = true;
      switch (*step) {
        case 0:
          body.Announce();
          break;
        case 1:
          body.SendFirst();
          break;
        case 2:
          done = body.Hear();
          if (done) places = body.Places();
          break;
        default: {
          const uint32_t w = *step - 3, first = w * window;
          if (first >= places) return body.Finish();
          done = body.Exchange(w, first, places - first);
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
    const uint32_t window, ahead;  // packs

    JIN_FN int Size() const { return N > 0 ? N : g.size; }
    JIN_FN int Each() const { return static_cast<int>(K > 0 ? K : c.updates); }
    JIN_FN int Count() const { return Size() * Each(); }
    // i / Each(), but faster: the error is less than kMaxUpdates / 2^20.
    JIN_FN int RankOf(int i) const {
      static_assert(kMaxUpdates <= 1 << 10);
      return K == 1 ? i : static_cast<int>(i * ((1u << 20) / Each() + 1) >> 20);
    }
    // The packs of the stream to or from a rank.
    JIN_FN uint32_t PacksWith(const Updates& of, int peer) const {
      return of.end[(peer + 1) * Each() - 1];
    }
    JIN_FN char* Notices(int of_rank, int from) const {
      const size_t slot = SlotOf(from, of_rank) * t.Blocks() + t.Block();
      return g.EpochBuffer(of_rank, epoch) + slot * Each() * FlaggedPackets::kBytes;
    }
    JIN_FN char* Window(int of_rank, int from, uint32_t w) const {
      const uint32_t slot = w % 2 * (Size() - 1) + SlotOf(from, of_rank);
      return g.EpochBuffer(of_rank, epoch) + NoticeBytes(Size(), t.Blocks(), Each()) +
             size_t{slot * c.window} * Packets::kBytes;
    }

    // Where pack i of the stream to or from a rank begins: its update, and the bytes behind the
    // update's first row; and its bytes.
    struct Place {
      int u;
      size_t at, bytes;
    };
    JIN_FN Place PlaceOf(const Updates& of, int peer, uint32_t i) const {
      const int first = peer * Each();
      const int u = K == 1 ? first : PartOf(i, of.end, first, first + Each() - 1);
      const size_t at = size_t{i - (u == first ? 0 : of.end[u - 1])} * sizeof(Pack);
      const size_t bytes = size_t{of.rows[u].end - of.rows[u].begin} * c.row_bytes - at;
      return {u, at, bytes < sizeof(Pack) ? bytes : sizeof(Pack)};
    }

    JIN_FN Pack LoadSent(const Place& p) const {
      const char* const from =
          static_cast<const char*>(c.in) + size_t{table.sent.rows[p.u].begin} * c.row_bytes + p.at;
      return LoadInput(from, p.bytes, 0, (reinterpret_cast<uintptr_t>(from) & 15) == 0);
    }
    JIN_FN void StoreReceived(const Place& p, const Pack& pack) const {
      const size_t at = size_t{table.received.rows[p.u].begin} * c.row_bytes + p.at;
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
      for (int v = u + 1; v < Count(); ++v) {
        const auto rows = table.received.rows[v];
        if (byte >= size_t{rows.begin} * c.row_bytes && byte < size_t{rows.end} * c.row_bytes) {
          return false;
        }
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
        t.Refuse(UpdateFault{source, destination, i - RankOf(i) * Each(), rows, in_row, out_row,
                             received, c.in_rows, c.out_rows});
      }
      const uint32_t count = bad ? 0 : rows;
      const uint32_t begin = bad ? 0 : (to == &table.sent ? in_row : out_row);
      to->rows[i] = {begin, begin + count};
      to->packs[i] = static_cast<uint32_t>(PacksOf(size_t{count} * c.row_bytes));
    }
    JIN_FN uint32_t SentPacks(int first, int end) const {
      uint32_t packs = 0;
      for (int u = first; u < end; ++u) packs += table.sent.packs[u];
      return packs;
    }

    JIN_FN void Announce() const {
      if (t.Thread() == 0) table.unordered[0] = table.unordered[1] = 0;
      for (int i = t.Thread(); i < Count(); i += t.Threads()) {
        const int32_t rows = c.send_sizes[i], in_row = c.input_offsets[i],
                      out_row = c.output_offsets[i], expected = c.recv_sizes[i];
        const int to = RankOf(i);
        t.Admit();
        table.received.packs[i] = expected;
        if (to == g.rank) Enter(&table.received, i, to, to, rows, in_row, out_row, expected);
        Enter(&table.sent, i, g.rank, to, rows, in_row, out_row, rows);
      }
      t.Sync();
      const int parts = (Each() + kSummed - 1) / kSummed;
      if (parts > 1) {
        for (int s = t.Thread(); s < Size() * parts; s += t.Threads()) {
          const int end = (s / parts + 1) * Each(), first = end - Each() + s % parts * kSummed;
          table.sums[s] = SentPacks(first, first + kSummed < end ? first + kSummed : end);
        }
        t.Sync();
      }
      for (int i = t.Thread(); i < Count(); i += t.Threads()) {
        const int to = RankOf(i), u = i - to * Each(), part = u / kSummed;
        uint32_t end = SentPacks(i - u % kSummed, i + 1);
        for (int s = 0; s < part; ++s) end += table.sums[to * parts + s];
        table.sent.end[i] = end;
        if (to == g.rank) {
          table.received.end[i] = end;
        } else {
          const Pack notice{{static_cast<uint32_t>(c.send_sizes[i]),
                             static_cast<uint32_t>(c.input_offsets[i]),
                             static_cast<uint32_t>(c.output_offsets[i]), end}};
          FlaggedPackets::Put(Notices(to, g.rank), u, notice);
        }
      }
      t.Sync();
    }

    JIN_FN void SendFirst() const {
      for (auto i = static_cast<uint32_t>(t.First()); i < ahead;
           i += static_cast<uint32_t>(t.Stride())) {
        for (int k = 1; k < Size(); ++k) {
          const int to = Ranks<N>::After(g.rank, k, Size());
          if (i >= PacksWith(table.sent, to)) continue;
          const Pack sent = LoadSent(PlaceOf(table.sent, to, i));
          Packets::Put(Window(to, g.rank, 0), i, SendableOf<Type>(t, sent));
        }
      }
    }

    JIN_FN bool Hear() const {
      Updates& all = table.received;
      for (int i = t.FirstUpdate(); i < Count(); i += t.Threads()) {
        const int from = RankOf(i), u = i - from * Each();
        if (from == g.rank) continue;
        Pack p;
        char* const notices = Notices(g.rank, from);
        while (!FlaggedPackets::TryGet(notices, u, &p)) {
          if (!t.Wait(i, from)) return false;
        }
        FlaggedPackets::Arm(notices, u);
        Enter(&all, i, from, g.rank, static_cast<int32_t>(p.word[0]),
              static_cast<int32_t>(p.word[1]), static_cast<int32_t>(p.word[2]),
              static_cast<int32_t>(all.packs[i]));
        all.end[i] = p.word[3];
      }
      t.Sync();
      if (Count() > kCompared) {
        for (int i = t.Thread(); i < Count() - 1; i += t.Threads()) {
          const int below = i + Each() < Count() ? i + Each() : i + Each() - Count() + 1;
          if (all.rows[i].end > all.rows[i + 1].begin) v1::Exchange(&table.unordered[0], 1);
          if (all.rows[i].end > all.rows[below].begin) v1::Exchange(&table.unordered[1], 1);
        }
        t.Sync();
      }
      // Places that ascend, in the order of updates or of each rank's first, second, ..., are
      // apart.
      const bool apart = Count() > kCompared && table.unordered[0] * table.unordered[1] == 0;
      for (int i = t.Thread(); i < Count(); i += t.Threads()) {
        const auto own = all.rows[i];
        bool covered = false;
        for (int v = apart ? Count() : i + 1; v < Count(); ++v) {
          const auto other = all.rows[v];
          covered |= other.begin < own.end && own.begin < other.end;
        }
        table.covered[i] = covered;
      }
      t.Sync();
      return true;
    }

    // The places of all streams, that of the rank to itself included.
    JIN_FN uint32_t Places() const {
      uint32_t places = 0;
      for (int r = 0; r < Size(); ++r) {
        const uint32_t taken = PacksWith(table.received, r), sent = PacksWith(table.sent, r);
        if (taken > places) places = taken;
        if (sent > places + ahead) places = sent - ahead;
      }
      return places;
    }

    // Goes through the places of window w, of which so many are left: sends what is `ahead` of
    // them, takes what has come, and copies what the rank sends to itself. All is loaded before the
    // first store.
    JIN_FN bool Exchange(uint32_t w, uint32_t first, uint32_t left) const {
      const size_t from_unit = t.First();  // where it is resumed: of which peer, what, and where
      auto j = static_cast<uint32_t>(from_unit);
      int k = static_cast<int>(from_unit >> 32 & 0xFF) + 1;
      bool only_take = from_unit >> 40 != 0;
      uint32_t has_room = 0;  // by rank
      uint32_t room_of = w;   // a window
      for (; j < window && j < left; j += static_cast<uint32_t>(t.Stride()), k = 1) {
        const uint32_t i = first + j;
        const bool next = j + ahead >= window;
        const uint32_t to_window = w + next, at = j + ahead - (next ? window : 0);
        if (room_of != to_window) has_room = 0;
        room_of = to_window;
        for (; k < Size(); ++k, only_take = false) {
          const size_t unit = size_t(k - 1) << 32 | j;
          const int to = Ranks<N>::After(g.rank, k, Size());
          const int from = Ranks<N>::After(g.rank, Size() - k, Size());
          const bool sends = !only_take && i + ahead < PacksWith(table.sent, to);
          const bool copies = k == 1 && i < PacksWith(table.sent, g.rank);
          const bool takes = i < PacksWith(table.received, from);
          char* const slot = Window(g.rank, from, w);
          Pack sent = {}, own = {}, taken;
          Place place{}, there{};
          if (sends) sent = LoadSent(PlaceOf(table.sent, to, i + ahead));
          if (copies) own = LoadSent(place = PlaceOf(table.sent, g.rank, i));
          if (takes) there = PlaceOf(table.received, from, i);
          bool arrived = takes && Packets::TryGet(slot, j, &taken);
          while (sends && to_window >= 2 && (has_room >> to & 1) == 0) {
            if (HasTaken(g, to, t.Block(), to_window - 1)) {
              has_room |= 1u << to;
            } else if (!t.Wait(unit, to)) {
              return false;
            }
          }
          if (sends) Packets::Put(Window(to, g.rank, to_window), at, SendableOf<Type>(t, sent));
          if (copies) StoreReceived(place, SendableOf<Type>(t, own));
          if (!takes) continue;
          while (!arrived) {
            if (!t.Wait(unit | size_t{1} << 40, from)) return false;
            arrived = Packets::TryGet(slot, j, &taken);
          }
          Packets::Arm(slot, j);
          StoreReceived(there, taken);
        }
      }
      t.Arrived();  // each window is waited for by itself
      if (left <= 2 * window) return true;
      t.Sync();  // every thread of the block has armed what it received
      for (int r = t.Thread(); r < Size(); r += t.Threads()) {
        if (r != g.rank && PacksWith(table.received, r) > (w + 2) * window) {
          TellTaken(g, r, t.Block(), w + 1);
        }
      }
      return true;
    }

    JIN_FN bool Finish() const {
      t.Sync();  // no thread of the block looks for room any more
      for (int r = t.FirstUpdate(); r < Size(); r += t.Threads()) {
        const uint32_t packs = PacksWith(table.sent, r);
        if (r == g.rank || packs <= 2 * window) continue;
        while (!HasTaken(g, r, t.Block(), (packs - 1) / window - 1)) {
          if (!t.Wait(r, r)) return false;
        }
        ClearTaken(g, r, t.Block());
      }
      return true;
    }
  };
};

}  // namespace jax_intranode
