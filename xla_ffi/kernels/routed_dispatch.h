// A dispatch of few tokens as one operation: it finds who goes where while the rows travel. A
// dispatch of more tokens is an AllGather of who goes where, the layout (cuda/experts.cu), and the
// exchange (experts.h).
//
// A call is one operation of group.h and takes one epoch:
//   Send   send the ids of this rank's experts; the rows, and behind them the weights
//   Hear   await the ids of all ranks; find the rows of this rank, tell the results, and clear the
//          rows without tokens
//   Take   await rows and weights of all ranks, and store them and the rank's own
//
// A rank sends without knowing of the others: a token goes to those ranks that have experts of it,
// into the place of its number, which stays empty on other ranks. The places of all tokens fit into
// an epoch buffer, so nobody waits for room.
//
// Each block needs the ids of all ranks, but waits only for blocks of its number: these send it a
// copy. So a packet has one writer, and one thread reads and arms it. This thread enters the ids in
// the block's table, which only the block's threads read, behind a Sync. A block sends ids to each
// rank whatever they are, and hears all ranks, so the argument of group.h holds.
//
// An id travels as a byte: the number of the expert on the receiving rank, from 1 on; 0 for others
// and for none. A rank has fewer than 255 experts, so no word of a packet is empty.
//
// Rows are sorted by expert, rank, position and choice. A warp counts the ids of a part, in this
// order, by expert. What the parts before have counted, and the experts before, is where the rows
// of a part begin. If there is no room for all, those are kept that come first in the order of
// position, rank and choice; the others get the number behind the last expert's, and all are
// counted again.
//
// tests/native/protocol_test.cc runs it.
#pragma once

#include "experts.h"

// For loops whose unrolled code is not worth its room in the instruction cache.
#if defined(__CUDACC__)
#define JIN_LOOP _Pragma("unroll 1")
#else
#define JIN_LOOP
#endif

namespace jax_intranode {

// What a block knows of the ids of all ranks, in order.
struct RoutingTable {
  static constexpr uint32_t kNumbers = 256;

  alignas(16) uint8_t number[kMostRoutedIds];    // of the expert on this rank; 0: of none
  alignas(16) int32_t place[kMostRoutedIds];     // as in ExpertsCall
  uint16_t before[kMostRoutedParts][kNumbers];   // how many ids of a number the parts before have
  uint16_t size[kNumbers], start[kNumbers + 1];  // of each number: its ids, and their first row
  uint8_t ranks[kMostIdsOfRank];  // of the experts of each token of this rank, as bits
  uint16_t here[kMostIdsOfRank];  // of each position: the ids of experts of this rank
  uint32_t dropped[kMaxRanks];
};

// `N` is the group's size where it is known when compiling, else 0. Thread, besides what group.h
// says: kLanes, the threads that work together; Same(v), how many of them have the same v, below
// 256, before this one and in all; SyncLanes(); Add(&sum, v), where other threads add, too.
template <int N>
struct RoutedDispatch {
  using Packets = BarePackets;
  using Type = CopiedAs<F32>;

  // Runs the call from step `*step` on. False: a wait was given up; the step may be resumed.
  template <class Thread, class G>
  JIN_FN static bool Run(Thread& t, const G& g, const RoutedCall& c, RoutingTable& table,
                         uint32_t epoch, uint32_t* step) {
    ExpertsCall placed = c.rows;
    placed.places = table.place;
    const auto row_packs = static_cast<uint32_t>(PacksOf(c.rows.row_bytes));
    const Body<Thread, G> body{
        t, g, c, table, epoch, {t, g, placed, epoch, row_packs, 0, 0, c.rows.tokens * row_packs}};
    if (*step == 0) body.Send();
    if (*step <= 1) {
      *step = 1;
      if (!body.Hear()) return false;
      body.Route();
      body.Tell();
      *step = 2;
    }
    return body.Take();
  }

 private:
  static constexpr uint32_t kIds = sizeof(Pack);  // of a packet
  static constexpr uint32_t kSent = 2;            // the packs that are loaded together

  template <class Thread, class G>
  struct Body {
    using ExpertRows = typename Experts<Type, N, false, Packets>::template Body<Thread, G>;

    Thread& t;
    const G& g;
    const RoutedCall& c;
    RoutingTable& table;
    const uint32_t epoch;
    const ExpertRows rows;
    const uint32_t ids = c.rows.tokens * c.rows.choices;  // of a rank
    const uint32_t id_packs = (ids + kIds - 1) / kIds;
    // Of a stream between two ranks: the places of rows, then the weights.
    const uint32_t packs = rows.places + static_cast<uint32_t>(c.weights.Packs());

    JIN_FN int Size() const { return N > 0 ? N : g.size; }
    JIN_FN char* IdsAt(int of_rank, int from) const {
      const size_t slot = SlotOf(from, of_rank) * t.Blocks() + t.Block();
      return g.EpochBuffer(of_rank, epoch) + slot * id_packs * Packets::kBytes;
    }
    JIN_FN char* StreamAt(int of_rank, int from) const {
      const size_t before = size_t(Size() - 1) * t.Blocks() * id_packs;
      return g.EpochBuffer(of_rank, epoch) +
             (before + size_t(SlotOf(from, of_rank)) * packs) * Packets::kBytes;
    }

    JIN_FN void LoadIds(uint32_t i, uint32_t (&id)[kIds]) const {
      JIN_UNROLL
      for (uint32_t j = 0; j < kIds; j += 4) {
        const Pack four = c.ids.Load((i * kIds + j) / 4);
        memcpy(&id[j], &four, sizeof four);
      }
    }
    // Ids as they travel to a rank.
    JIN_FN Pack NumbersOf(int rank, const uint32_t (&id)[kIds]) const {
      Pack pack = {};
      JIN_UNROLL
      for (uint32_t j = 0; j < kIds; ++j) {
        const uint32_t number = id[j] - rank * c.experts;
        pack.word[j / 4] |= (number < c.experts ? number + 1 : 0) << 8 * (j % 4);
      }
      return pack;
    }
    JIN_FN void Enter(int rank, uint32_t i, const Pack& numbers) const {
      StoreOutput(table.number + rank * ids, ids, i, ids % kIds == 0, numbers);
    }

    // A pack of a stream, of this rank; not made sendable, which would wait for it.
    JIN_FN Pack Load(uint32_t i) const {
      const auto place = rows.PlaceOf(i);
      return i < rows.places ? rows.Load(place.p, place.h) : c.weights.Load(i - rows.places);
    }
    // The first loads of a thread come before all stores, and before it needs the epoch.
    JIN_FN void Send() const {
      const auto stride = static_cast<uint32_t>(t.Stride());
      auto i = static_cast<uint32_t>(t.First());
      Pack some[kSent];
      const auto load = [&] {
        JIN_UNROLL
        for (uint32_t u = 0; u < kSent; ++u) {
          if (i + u * stride < packs) some[u] = Load(i + u * stride);
        }
      };
      uint32_t k = t.Thread(), sent[kIds] = {};
      if (k < id_packs) LoadIds(k, sent);
      load();
      t.Admit();
      while (k < id_packs) {
        for (int step = 1; step < Size(); ++step) {
          const int to = Ranks<N>::After(g.rank, step, g.size);
          Packets::Put(IdsAt(to, g.rank), k, NumbersOf(to, sent));
        }
        Enter(g.rank, k, NumbersOf(g.rank, sent));
        k += t.Threads();
        if (k < id_packs) LoadIds(k, sent);
      }

      const auto* const of_rank = static_cast<const uint32_t*>(c.ids.in);
      JIN_LOOP
      for (uint32_t p = t.Thread(); p < c.rows.tokens; p += t.Threads()) {
        uint32_t ranks = 0;
        for (uint32_t j = 0; j < c.rows.choices; ++j) {
          const uint32_t id = of_rank[p * c.rows.choices + j];
          if (id < Size() * c.experts) ranks |= 1u << id / c.experts;
        }
        table.ranks[p] = static_cast<uint8_t>(ranks);
      }
      for (int r = t.Thread(); r < Size(); r += t.Threads()) table.dropped[r] = 0;
      t.Sync();

      while (i < packs) {
        JIN_UNROLL
        for (uint32_t u = 0; u < kSent; ++u) {
          const uint32_t at = i + u * stride;
          if (at >= packs) continue;
          const uint32_t ranks = at < rows.places ? table.ranks[rows.PlaceOf(at).p] : ~0u;
          const Pack pack = SendableOf<Type>(t, some[u]);
          for (int step = 1; step < Size(); ++step) {
            const int to = Ranks<N>::After(g.rank, step, g.size);
            if ((ranks >> to & 1) != 0) Packets::Put(StreamAt(to, g.rank), at, pack);
          }
        }
        i += kSent * stride;
        load();
      }
    }

    JIN_FN bool Hear() const {
      const uint32_t all = (Size() - 1) * id_packs;
      for (uint32_t u = t.FirstUpdate(); u < all; u += t.Threads()) {
        const int step = Size() - 1 - static_cast<int>(u / id_packs);
        const int from = Ranks<N>::After(g.rank, step, g.size);
        const uint32_t i = u % id_packs;
        Pack numbers;
        while (!Packets::TryGet(IdsAt(g.rank, from), i, &numbers)) {
          if (!t.Wait(u, from)) return false;
        }
        Packets::Arm(IdsAt(g.rank, from), i);
        Enter(from, i, numbers);
      }
      t.Arrived();
      return true;
    }

    // The part of the ids that the threads of a warp count, and a thread's number among them.
    JIN_FN uint32_t Lane() const { return t.Thread() % Thread::kLanes; }
    JIN_FN uint32_t Part() const { return t.Thread() / Thread::kLanes; }
    // Calls f(i) for the ids of the part, one of a thread at a time, and for some behind the end.
    template <class F>
    JIN_FN void ForEachOfPart(const F& f) const {
      const uint32_t all = Size() * ids, each = (all + t.Threads() - 1) / t.Threads();
      for (uint32_t j = 0; j < each; ++j) f((Part() * each + j) * Thread::kLanes + Lane(), all);
    }

    // Counts the ids of each part, and gives each its number among those of its part and expert.
    JIN_FN void Count() const {
      uint16_t* const found = table.before[Part()];
      for (uint32_t n = Lane(); n < c.experts + 2; n += Thread::kLanes) found[n] = 0;
      t.SyncLanes();
      ForEachOfPart([&](uint32_t i, uint32_t all) {
        const uint32_t number = i < all ? table.number[i] : 0;
        const SameLanes same = t.Same(number);
        const uint32_t here = found[number];
        t.SyncLanes();  // all have read it
        if (i < all) table.place[i] = static_cast<int32_t>(here + same.before);
        if (same.before == 0) found[number] = static_cast<uint16_t>(here + same.all);
        t.SyncLanes();
      });
      t.Sync();
    }
    // Where the rows of each part and expert begin. Returns how many rows are used.
    JIN_FN uint32_t Start() const {
      const uint32_t parts = t.Threads() / Thread::kLanes;
      JIN_LOOP
      for (uint32_t n = t.Thread(); n <= c.experts; n += t.Threads()) {
        uint32_t of_part[kMostRoutedParts], sum = 0;
        JIN_UNROLL
        for (uint32_t p = 0; p < kMostRoutedParts; ++p) {  // all loads before the first store
          of_part[p] = p < parts ? table.before[p][n] : 0;
        }
        JIN_UNROLL
        for (uint32_t p = 0; p < kMostRoutedParts; ++p) {
          if (p < parts) table.before[p][n] = static_cast<uint16_t>(sum);
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
    // Takes the number from those for which there is no room.
    JIN_FN void Drop() const {
      const uint32_t tokens = c.rows.tokens, choices = c.rows.choices;
      JIN_LOOP
      for (uint32_t p = t.Thread(); p < tokens; p += t.Threads()) {
        uint32_t count = 0;
        for (uint32_t i = p * choices; i < Size() * ids; i += ids) {
          for (uint32_t j = 0; j < choices; ++j) count += table.number[i + j] != 0;
        }
        table.here[p] = static_cast<uint16_t>(count);
      }
      t.Sync();
      JIN_LOOP
      for (uint32_t p = t.Thread(); p < tokens; p += t.Threads()) {
        uint32_t kept = 0;
        for (uint32_t q = 0; q < p; ++q) kept += table.here[q];
        JIN_LOOP
        for (int r = 0; r < Size(); ++r) {
          uint32_t dropped = 0;
          JIN_LOOP
          for (uint32_t j = 0; j < choices; ++j) {
            uint8_t& number = table.number[r * ids + p * choices + j];
            if (number == 0 || kept++ < c.rows.capacity) continue;
            number = static_cast<uint8_t>(c.experts + 1);
            ++dropped;
          }
          t.Add(&table.dropped[r], dropped);
        }
      }
      t.Sync();
    }

    JIN_FN void Route() const {
      t.Sync();  // the ids of all ranks are in the table
      JIN_LOOP
      for (;;) {
        Count();
        if (Start() <= c.rows.capacity) break;
        Drop();  // at most once
      }
      const uint16_t* const before = table.before[Part()];
      ForEachOfPart([&](uint32_t i, uint32_t all) {
        if (i >= all) return;
        const uint32_t number = table.number[i];
        const uint32_t row = table.start[number] + before[number] + table.place[i];
        table.place[i] = number == 0 ? -1 : number > c.experts ? -2 : static_cast<int32_t>(row);
      });
      t.Sync();
    }

    // The last threads of the grid have the fewest packs.
    JIN_FN void Tell() const {
      const auto stride = static_cast<uint32_t>(t.Stride()),
                 first = stride - 1 - static_cast<uint32_t>(t.First());
      const auto tell = [&](void* to, const auto* from, uint32_t count) {
        JIN_LOOP
        for (uint32_t i = first; i < count; i += stride) static_cast<int32_t*>(to)[i] = from[i];
      };
      const uint16_t* const used = table.start + c.experts + 1;
      tell(c.ids.out, table.place, Size() * ids);
      tell(c.ranks, table.ranks, c.rows.tokens);
      tell(c.sizes, table.size + 1, c.experts);
      tell(c.used, used, 1);
      tell(c.dropped, table.dropped, Size());
      const size_t end = size_t{c.rows.capacity} * rows.row_packs;
      JIN_LOOP
      for (size_t i = size_t{*used} * rows.row_packs + first; i < end; i += stride) {
        rows.StoreRow(static_cast<uint32_t>(i / rows.row_packs),
                      static_cast<uint32_t>(i % rows.row_packs), Pack{});
      }
    }

    JIN_FN bool Take() const {
      const size_t from_unit = t.First();  // where it is resumed: of which peer, and where
      int k = static_cast<int>(from_unit >> 32) + 1;
      for (auto i = static_cast<uint32_t>(from_unit); i < packs;
           i += static_cast<uint32_t>(t.Stride())) {
        const bool is_row = i < rows.places;
        const auto place = rows.PlaceOf(i);
        const auto store = [&](int rank, const Pack& pack) {
          if (is_row) {
            rows.StoreRows(rank, place, rows.RowsOf(rank, place.p, 0), pack);
          } else {
            c.weights.OutputOf(rank).Store(i - rows.places, pack);
          }
        };
        const Pack own = Load(i);
        for (; k < Size(); ++k) {
          const int from = Ranks<N>::After(g.rank, Size() - k, g.size);
          char* const slot = StreamAt(g.rank, from);
          // A token comes if it has experts here, also where there is no room.
          const bool comes =
              !is_row || rows.HasExpertsHere(from, place.p, rows.RowsOf(from, place.p, 0));
          Pack pack;
          bool has = comes && Packets::TryGet(slot, i, &pack);
          if (k == 1) store(g.rank, SendableOf<Type>(t, own));  // while the other one is loaded
          if (!comes) continue;
          while (!has) {
            if (!t.Wait(size_t(k - 1) << 32 | i, from)) return false;
            has = Packets::TryGet(slot, i, &pack);
          }
          Packets::Arm(slot, i);
          store(from, pack);
        }
        k = 1;
      }
      t.Arrived();
      return true;
    }
  };
};

}  // namespace jax_intranode
