// A dispatch of few tokens as one operation: it finds who goes where while the rows travel. A
// dispatch of more tokens is an AllGather of who goes where, the layout (cuda/experts.cu), and the
// exchange (experts.h).
//
// A call is one operation of group.h and takes one epoch:
//   Send     send the ids of this rank's experts, the rows, and the weights as an AllGather does
//   Hear     await the ids of all ranks
//   Route    find the rows of this rank; store its own tokens in them; clear the others
//   Take     await the tokens of all ranks, and store them
//   Tell     store places, ranks, sizes, used and dropped
//   Weights  await the weights, and store them
//
// A rank sends without knowing of the others: a token goes to those ranks that have experts of it,
// into the place of its number, which stays empty on other ranks. The places of all tokens fit into
// an epoch buffer, so nobody waits for room.
//
// Where a token is stored depends on the ids of all ranks. Each block needs them, but waits only
// for blocks of its number: the block of its number on each other rank sends it a copy. So a packet
// has one writer, and one thread reads and arms it. This thread stores the ids in the block's table
// (RoutingTable), which only the threads of the block read, behind a Sync. A block sends ids to
// each rank whatever they are, and hears all ranks, so the argument of group.h holds.
//
// An id travels as a byte: the number of the expert on the receiving rank, from 1 on; 0 for experts
// of other ranks and for none. A rank has less than 255 experts, so no word of a packet is empty.
//
// Rows are sorted by expert, rank, position and choice. A warp counts the ids of a part, in this
// order, by expert. What the parts before have counted, and the experts before, is where the rows
// of a part begin. If there is no room for all, those are kept that come first in the order of
// position, rank and choice; the others get the number 255, and all are counted again.
//
// tests/native/protocol_test.cc runs it.
#pragma once

#include <bit>

#include "experts.h"
#include "one_hop.h"

// Of code that is not worth its room in the cache of instructions.
#if defined(__CUDACC__)
#define JIN_LOOP _Pragma("unroll 1")
#else
#define JIN_LOOP
#endif

namespace jax_intranode {

// What a block knows of the ids of all ranks: `padded` of each rank, in order (RoutedCall).
struct RoutingTable {
  static constexpr uint32_t kNumbers = 256, kDropped = 255;
  static constexpr uint16_t kNoRow = 0xFFFF, kNoRoom = 0xFFFE;

  alignas(16) uint8_t number[kMostRoutedIds];  // of the expert on this rank; 0, kDropped
  alignas(16) uint16_t place[kMostRoutedIds];  // the row, kNoRow or kNoRoom
  // How many ids of a number there are in the parts before.
  alignas(16) uint16_t before[kMostRoutedParts][kNumbers];
  uint16_t size[kNumbers], start[kNumbers + 1];  // of each number: its ids, and their first row
  uint32_t sum, dropped[kMaxRanks];
};

// `N` is the group's size where it is known when compiling, else 0. Thread, besides what group.h
// says: kLanes, the threads that work together; Same(v), those of them, as bits, that have the
// same v, below 256; SyncLanes(); AddAll(&sum, v), which adds the v of all of them.
template <int N, class PacketsOfType = BarePackets>
struct RoutedDispatch {
  using Packets = PacketsOfType;
  using Type = CopiedAs<F32>;
  using Weights = AllGather<Type, N, Packets>;

  // Runs the call from step `*step` on. False: a wait was given up; the step may be resumed.
  template <class Thread, class G>
  JIN_FN static bool Run(Thread& t, const G& g, const RoutedCall& c, RoutingTable& table,
                         uint32_t epoch, uint32_t* step) {
    const Body<Thread, G> body{t, g, c, table, epoch, static_cast<uint32_t>(PacksOf(c.row_bytes))};
    for (; *step < 6; ++*step) {
      bool done = true;
      switch (*step) {
        case 0:
          body.Send();
          break;
        case 1:
          done = body.Hear();
          break;
        case 2:
          body.Route();
          body.StoreOwn();
          break;
        case 3:
          done = body.Take();
          break;
        case 4:
          body.Tell();
          break;
        default:
          done = Weights::Take(t, g, c.weights, epoch);
      }
      if (!done) return false;
    }
    return true;
  }

 private:
  static constexpr uint32_t kIds = sizeof(Pack);  // of a packet
  static constexpr uint32_t kAtOnce = 8;          // the choices whose rows are loaded together
  static constexpr uint32_t kSent = 2;            // the packs that are loaded together

  template <class Thread, class G>
  struct Body {
    Thread& t;
    const G& g;
    const RoutedCall& c;
    RoutingTable& table;
    const uint32_t epoch;
    const uint32_t row_packs;
    const uint32_t ids = c.tokens * c.choices;          // of a rank
    const uint32_t id_packs = (ids + kIds - 1) / kIds;  // the same
    const uint32_t padded = id_packs * kIds;
    const uint32_t places = c.tokens * row_packs;

    JIN_FN int Size() const { return N > 0 ? N : g.size; }
    // Behind the weights: the ids for each block, then the rows.
    JIN_FN char* Ids(int of_rank, int from) const {
      const size_t slot = SlotOf(from, of_rank) * t.Blocks() + t.Block();
      return g.EpochBuffer(of_rank, epoch) + RoutedWeightBytes(Size(), ids) +
             slot * id_packs * Packets::kBytes;
    }
    JIN_FN char* Rows(int of_rank, int from) const {
      return g.EpochBuffer(of_rank, epoch) + RoutedWeightBytes(Size(), ids) +
             RoutedIdBytes(Size(), ids, t.Blocks()) +
             size_t(SlotOf(from, of_rank)) * places * Packets::kBytes;
    }

    JIN_FN Pack LoadToken(uint32_t i) const {
      const char* const row = static_cast<const char*>(c.in) + size_t{i / row_packs} * c.row_bytes;
      return SendableOf<Type>(t, LoadInput(row, c.row_bytes, i % row_packs, c.aligned));
    }
    JIN_FN char* Row(uint32_t row) const {
      return static_cast<char*>(c.out) + size_t{row} * c.row_bytes;
    }
    // Of rows that are aligned.
    JIN_FN void StoreAligned(uint32_t row, uint32_t h, const Pack& pack) const {
#if defined(__CUDACC__)  // not read soon, as in experts.h
      const uint4 v{pack.word[0], pack.word[1], pack.word[2], pack.word[3]};
      __stcs(reinterpret_cast<uint4*>(Row(row)) + h, v);
#else
      reinterpret_cast<Pack*>(Row(row))[h] = pack;
#endif
    }

    // The ranks that token p of this rank goes to, as bits.
    JIN_FN uint32_t RanksOf(uint32_t p) const {
      uint32_t ranks = 0;
      const int32_t* const at = c.ids + size_t{p} * c.choices;
      const auto enter = [&](int32_t id) {
        JIN_UNROLL
        for (int r = 0; r < Ranks<N>::kSlots; ++r) {
          const bool there = static_cast<uint32_t>(id) - r * c.experts < c.experts;
          if (Ranks<N>::Has(r, g.size) && there) ranks |= 1u << r;
        }
      };
      if (c.choices % 4 == 0 && c.aligned_ids) {
        for (uint32_t j = 0; j < c.choices; j += 4) {
          const Pack four = *reinterpret_cast<const Pack*>(at + j);
          JIN_UNROLL
          for (const uint32_t id : four.word) enter(static_cast<int32_t>(id));
        }
      } else {
        JIN_LOOP
        for (uint32_t j = 0; j < c.choices; ++j) enter(at[j]);
      }
      return ranks;
    }

    // 16 ids from i on, as they travel to a rank.
    JIN_FN Pack NumbersAt(int rank, const uint32_t (&id)[kIds]) const {
      Pack pack = {};
      JIN_UNROLL
      for (uint32_t j = 0; j < kIds; ++j) {
        const uint32_t number = id[j] - rank * c.experts;
        pack.word[j / 4] |= (number < c.experts ? number + 1 : 0) << 8 * (j % 4);
      }
      return pack;
    }
    JIN_FN void Enter(int rank, uint32_t i, const Pack& numbers) const {
      memcpy(table.number + rank * padded + i * kIds, &numbers, sizeof numbers);
    }

    JIN_FN void Send() const {
      JIN_LOOP
      for (uint32_t i = t.Thread(); i < id_packs; i += t.Threads()) {
        uint32_t id[kIds];
        const int32_t* const at = c.ids + i * kIds;
        if (c.aligned_ids && (i + 1) * kIds <= ids) {
          JIN_UNROLL
          for (uint32_t j = 0; j < kIds; j += 4) {
            const Pack four = *reinterpret_cast<const Pack*>(at + j);
            memcpy(&id[j], &four, sizeof four);
          }
        } else {
          JIN_UNROLL
          for (uint32_t j = 0; j < kIds; ++j) {
            id[j] = i * kIds + j < ids ? static_cast<uint32_t>(at[j]) : ~0u;
          }
        }
        t.Admit();
        for (int k = 1; k < Size(); ++k) {
          const int to = Ranks<N>::After(g.rank, k, g.size);
          Packets::Put(Ids(to, g.rank), i, NumbersAt(to, id));
        }
        Enter(g.rank, i, NumbersAt(g.rank, id));
      }
      for (int r = t.Thread(); r < Size(); r += t.Threads()) table.dropped[r] = 0;

      const auto stride = static_cast<uint32_t>(t.Stride());
      JIN_LOOP
      for (auto i = static_cast<uint32_t>(t.First()); i < places; i += kSent * stride) {
        Pack pack[kSent];
        uint32_t ranks[kSent] = {};
        JIN_UNROLL
        for (uint32_t u = 0; u < kSent; ++u) {  // all loads before the first store
          const uint32_t at = i + u * stride;
          if (at >= places) continue;
          pack[u] = LoadToken(at);
          ranks[u] = RanksOf(at / row_packs);
        }
        t.Admit();
        JIN_UNROLL
        for (uint32_t u = 0; u < kSent; ++u) {
          for (int k = 1; k < Size(); ++k) {
            const int to = Ranks<N>::After(g.rank, k, g.size);
            if ((ranks[u] >> to & 1) != 0) Packets::Put(Rows(to, g.rank), i + u * stride, pack[u]);
          }
        }
      }
      Weights::Send(t, g, c.weights, epoch);
    }

    JIN_FN bool Hear() const {
      const uint32_t all = (Size() - 1) * id_packs;
      JIN_LOOP
      for (uint32_t u = t.FirstUpdate(); u < all; u += t.Threads()) {
        const int from =
            Ranks<N>::After(g.rank, Size() - 1 - static_cast<int>(u / id_packs), g.size);
        const uint32_t i = u % id_packs;
        Pack numbers;
        while (!Packets::TryGet(Ids(g.rank, from), i, &numbers)) {
          if (!t.Wait(u, from)) return false;
        }
        Packets::Arm(Ids(g.rank, from), i);
        Enter(from, i, numbers);
      }
      t.Arrived();
      return true;
    }

    // The part of the ids that the threads of a warp count, and a thread's number among them.
    JIN_FN static uint32_t CountBits(uint32_t v) {
#if defined(__CUDACC__)
      return __popc(v);
#else
      return static_cast<uint32_t>(std::popcount(v));
#endif
    }
    JIN_FN uint32_t Lane() const { return t.Thread() % Thread::kLanes; }
    JIN_FN uint32_t Part() const { return t.Thread() / Thread::kLanes; }
    JIN_FN uint32_t Parts() const { return t.Threads() / Thread::kLanes; }
    // Calls f(i) for the ids of the part, one of a thread at a time, and for some behind the end.
    template <class F>
    JIN_FN void ForEachOfPart(const F& f) const {
      const uint32_t all = Size() * padded, lanes = Parts() * Thread::kLanes;
      const uint32_t each = (all + lanes - 1) / lanes;  // of a thread
      for (uint32_t j = 0; j < each; ++j) f((Part() * each + j) * Thread::kLanes + Lane(), all);
    }

    // Counts the ids of each part, and gives each its number among those of its part and expert.
    JIN_FN void Count() const {
      uint16_t* const found = table.before[Part()];
      for (uint32_t n = 8 * Lane(); n < RoutingTable::kNumbers; n += 8 * Thread::kLanes) {
        const Pack none = {};
        memcpy(found + n, &none, sizeof none);
      }
      t.SyncLanes();
      ForEachOfPart([&](uint32_t i, uint32_t all) {
        const uint32_t number = i < all ? table.number[i] : 0;
        const uint32_t same = t.Same(number);
        const uint32_t earlier = CountBits(same & ((1u << Lane()) - 1));
        const uint32_t here = found[number];
        t.SyncLanes();  // all have read it
        if (i < all) table.place[i] = static_cast<uint16_t>(here + earlier);
        if (earlier == 0) found[number] = static_cast<uint16_t>(here + CountBits(same));
        t.SyncLanes();
      });
      t.Sync();
    }
    // Where the rows of each part and expert begin. Returns how many rows are used.
    JIN_FN uint32_t Start() const {
      JIN_LOOP
      for (uint32_t n = t.Thread(); n <= c.experts; n += t.Threads()) {
        uint32_t of_part[kMostRoutedParts], sum = 0;
        JIN_UNROLL
        for (uint32_t p = 0; p < kMostRoutedParts; ++p) {  // all loads before the first store
          of_part[p] = p < Parts() ? table.before[p][n] : 0;
        }
        JIN_UNROLL
        for (uint32_t p = 0; p < kMostRoutedParts; ++p) {
          if (p < Parts()) table.before[p][n] = static_cast<uint16_t>(sum);
          sum += of_part[p];
        }
        table.size[n] = static_cast<uint16_t>(sum);
      }
      t.Sync();
      JIN_LOOP
      for (uint32_t n = t.Thread(); n <= c.experts + 1; n += t.Threads()) {
        uint32_t sum = 0;
        for (uint32_t m = 1; m < n; ++m) sum += table.size[m];
        table.start[n] = static_cast<uint16_t>(sum);
      }
      t.Sync();
      return table.start[c.experts + 1];
    }

    // How many ids of experts of this rank there are before a position.
    JIN_FN uint32_t HereBefore(uint32_t position) const {
      if (t.Thread() == 0) table.sum = 0;
      t.Sync();
      uint32_t here = 0;
      JIN_LOOP
      for (int r = 0; r < Size(); ++r) {
        JIN_LOOP
        for (uint32_t q = t.Thread(); q < position * c.choices; q += t.Threads()) {
          here += table.number[r * padded + q] != 0;
        }
      }
      t.AddAll(&table.sum, here);
      t.Sync();
      const uint32_t sum = table.sum;
      t.Sync();  // all have read it
      return sum;
    }
    // Takes the number from those for which there is no room.
    JIN_FN void Drop() const {
      uint32_t low = 0, high = c.tokens,
               kept = 0;  // all before `low` are kept, not all before high
      while (high - low > 1) {
        const uint32_t middle = (low + high) / 2, here = HereBefore(middle);
        const bool fits = here <= c.capacity;
        (fits ? low : high) = middle;
        if (fits) kept = here;
      }
      const uint32_t first = low * c.choices, end = first + c.choices;
      JIN_LOOP
      for (int r = 0; r < Size(); ++r) {
        JIN_LOOP
        for (uint32_t q = t.Thread(); q < ids; q += t.Threads()) {
          bool drop = q >= first && table.number[r * padded + q] != 0;
          if (drop && q < end) {
            uint32_t before = kept;
            JIN_LOOP
            for (int s = 0; s <= r; ++s) {
              JIN_LOOP
              for (uint32_t at = first; at < (s < r ? end : q); ++at) {
                before += table.number[s * padded + at] != 0;
              }
            }
            drop = before >= c.capacity;
          }
          table.place[r * padded + q] = drop;
        }
      }
      t.Sync();  // nobody reads the numbers any more
      JIN_LOOP
      for (int r = 0; r < Size(); ++r) {
        uint32_t dropped = 0;
        JIN_LOOP
        for (uint32_t q = t.Thread(); q < ids; q += t.Threads()) {
          if (table.place[r * padded + q] == 0) continue;
          table.number[r * padded + q] = RoutingTable::kDropped;
          ++dropped;
        }
        t.AddAll(&table.dropped[r], dropped);
      }
      t.Sync();
    }

    JIN_FN void Route() const {
      t.Sync();  // the ids of all ranks are in the table
      JIN_LOOP
      for (;;) {
        Count();
        if (Start() <= c.capacity) break;
        Drop();  // at most once
      }
      const uint16_t* const before = table.before[Part()];
      ForEachOfPart([&](uint32_t i, uint32_t all) {
        if (i >= all) return;
        const uint32_t number = table.number[i];
        const uint32_t row = table.start[number] + before[number] + table.place[i];
        table.place[i] = number == 0                        ? RoutingTable::kNoRow
                         : number == RoutingTable::kDropped ? RoutingTable::kNoRoom
                                                            : static_cast<uint16_t>(row);
      });
      t.Sync();
    }

    // Stores a pack of a token of a rank in all its rows.
    JIN_FN void StoreRows(int rank, uint32_t i, const Pack& pack) const {
      const uint16_t* const at = table.place + rank * padded + i / row_packs * c.choices;
      const uint32_t h = i % row_packs;
      if (!c.aligned || c.choices % kAtOnce != 0) {
        JIN_LOOP
        for (uint32_t j = 0; j < c.choices; ++j) {
          if (at[j] < RoutingTable::kNoRoom) {
            StoreOutput(Row(at[j]), c.row_bytes, h, c.aligned, pack);
          }
        }
        return;
      }
      JIN_LOOP
      for (uint32_t first = 0; first < c.choices; first += kAtOnce) {
        const Pack eight = *reinterpret_cast<const Pack*>(at + first);
        JIN_UNROLL
        for (uint32_t j = 0; j < kAtOnce; ++j) {
          const uint32_t row = eight.word[j / 2] >> 16 * (j % 2) & 0xFFFF;
          if (row < RoutingTable::kNoRoom) StoreAligned(row, h, pack);
        }
      }
    }
    // Whether the token of a place of a rank has experts here, also where there is no room.
    JIN_FN bool HasExpertsHere(int rank, uint32_t i) const {
      const uint16_t* const at = table.place + rank * padded + i / row_packs * c.choices;
      bool has = false;
      if (c.choices % kAtOnce == 0) {
        JIN_LOOP
        for (uint32_t first = 0; first < c.choices; first += kAtOnce) {
          const Pack eight = *reinterpret_cast<const Pack*>(at + first);
          has |= (eight.word[0] & eight.word[1] & eight.word[2] & eight.word[3]) != ~0u;
        }
      } else {
        JIN_LOOP
        for (uint32_t j = 0; j < c.choices; ++j) has |= at[j] != RoutingTable::kNoRow;
      }
      return has;
    }

    JIN_FN void StoreOwn() const {
      const auto first = static_cast<uint32_t>(t.First()),
                 stride = static_cast<uint32_t>(t.Stride());
      JIN_LOOP
      for (uint32_t i = first; i < places; i += stride) {
        if (HasExpertsHere(g.rank, i)) StoreRows(g.rank, i, LoadToken(i));
      }
      const size_t begin = size_t{table.start[c.experts + 1]} * row_packs;
      JIN_LOOP
      for (size_t i = begin + first; i < size_t{c.capacity} * row_packs; i += stride) {
        char* const row = Row(static_cast<uint32_t>(i / row_packs));
        StoreOutput(row, c.row_bytes, i % row_packs, c.aligned, Pack{});
      }
    }

    JIN_FN bool Take() const {
      const size_t from_unit = t.First();  // where it is resumed: of which peer, and where
      int k = static_cast<int>(from_unit >> 32) + 1;
      JIN_LOOP
      for (auto i = static_cast<uint32_t>(from_unit); i < places;
           i += static_cast<uint32_t>(t.Stride())) {
        for (; k < Size(); ++k) {
          const int from = Ranks<N>::After(g.rank, Size() - k, g.size);
          if (!HasExpertsHere(from, i)) continue;
          char* const slot = Rows(g.rank, from);
          Pack pack;
          while (!Packets::TryGet(slot, i, &pack)) {
            if (!t.Wait(size_t(k - 1) << 32 | i, from)) return false;
          }
          Packets::Arm(slot, i);
          StoreRows(from, i, pack);
        }
        k = 1;
      }
      t.Arrived();
      return true;
    }

    JIN_FN void Tell() const {
      const auto first = static_cast<uint32_t>(t.First()),
                 stride = static_cast<uint32_t>(t.Stride());
      JIN_LOOP
      for (uint32_t i = first; i < Size() * ids; i += stride) {
        const uint32_t row = table.place[i / ids * padded + i % ids];
        c.places[i] = row < RoutingTable::kNoRoom ? row : static_cast<int32_t>(row) - 0x10000;
      }
      JIN_LOOP
      for (uint32_t p = first; p < c.tokens; p += stride) {
        c.ranks[p] = static_cast<int32_t>(RanksOf(p));
      }
      if (t.Block() != 0) return;
      JIN_LOOP
      for (uint32_t n = t.Thread(); n < c.experts; n += t.Threads()) c.sizes[n] = table.size[n + 1];
      for (int r = t.Thread(); r < Size(); r += t.Threads()) {
        c.dropped[r] = static_cast<int32_t>(table.dropped[r]);
      }
      if (t.Thread() == 0) *c.used = table.start[c.experts + 1];
    }
  };
};

}  // namespace jax_intranode
