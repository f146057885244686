// Dispatch and combine of a mixture of experts: tokens go to the ranks of their experts, and what
// the experts have made of them comes back.
//
// Who goes where is data, but all that a rank must know of it has been computed before (the layout,
// cuda/experts.cu): `ranks`, which ranks have experts of the rank's own tokens, and `places`, which
// of its own rows belong to the tokens of any rank. -1: the expert is not of this rank; -2: it is,
// but there was no room. So a token goes to a rank, and comes back, if it has a place that is not
// -1 there.
//
// A call is one operation of group.h and takes one epoch, whatever `ranks` and `places` say: each
// block sends a notice to the block of its number on each rank, and hears all of them after the
// first window. So the argument of group.h holds.
//
// The stream between two ranks has the same places in both directions: place p * P + h is pack h of
// token p, of P packs that a row takes. Places of tokens that don't cross stay empty; both ranks
// know them. A token with several experts of a rank crosses once:
//   dispatch  The receiver stores the pack in up to `choices` rows.
//   combine   The rank of the experts multiplies the packs of the token's rows by their weights,
//             adds them in the order of the choices and rounds. The rank of the token waits for the
//             packs of all its ranks and adds them in rank order.
// Sums are float32 and start at 0; products are rounded before they are added.
//
// Windows, `taken`, and why nobody waits for ever are those of ragged.h, with streams of the same
// length between all ranks. A window may be empty, so what orders `taken` of this call behind that
// of the last one is a notice: d tells s of a window when it has heard the notice of s, which s has
// sent in this call, behind the clearing. Each byte of a result has one writer.
//
// Model: tests/native/model/ragged_model.cc.
#pragma once

#include "experts_call.h"
#include "norm.h"
#include "ragged.h"

namespace jax_intranode {

// `N` is the group's size where it is known when compiling, else 0.
template <class Type, int N, bool kCombines, class PacketsOfType = typename Type::Packets>
struct Experts {
  using Packets = PacketsOfType;

  // Runs the call from step `*step` on. False: a wait was given up; the step may be resumed.
  template <class Thread, class G>
  JIN_FN static bool Run(Thread& t, const G& g, const ExpertsCall& c, uint32_t epoch,
                         uint32_t* step) {
    const auto stride = static_cast<uint32_t>(t.Stride());
    const auto row_packs = static_cast<uint32_t>(PacksOf(c.row_bytes));
    // As in ragged.h: each thread has the same places in all windows.
    const uint32_t window = c.window > stride ? c.window - c.window % stride : c.window;
    const uint32_t ahead = window < stride || stride == 1 ? window : stride;
    const Body<Thread, G> body{t, g, c, epoch, row_packs, window, ahead, c.tokens * row_packs};
    for (;; ++*step) {
      const uint32_t w = (*step - 1) / 2;
      bool done = true;
      if (*step == 0) {
        body.Begin();
      } else if (w * window >= body.places) {
        return body.Finish(w);
      } else {
        done = *step % 2 == 1 ? body.Exchange(w) : body.Tell(w);
      }
      if (!done) return false;
    }
  }

  static constexpr uint32_t kAtOnce = 8;  // the choices that are loaded together

  template <class Thread, class G>
  struct Body {  // routed_dispatch.h has one, too
    Thread& t;
    const G& g;
    const ExpertsCall& c;
    const uint32_t epoch;
    const uint32_t row_packs;
    const uint32_t window, ahead;  // packs
    const uint32_t places;         // of a stream

    JIN_FN int Size() const { return N > 0 ? N : g.size; }
    JIN_FN char* Notice(int of_rank, int from) const {
      const size_t slot = SlotOf(from, of_rank) * t.Blocks() + t.Block();
      return g.EpochBuffer(of_rank, epoch) + slot * FlaggedPackets::kBytes;
    }
    JIN_FN char* Window(int of_rank, int from, uint32_t w) const {
      const uint32_t slot = w % 2 * (Size() - 1) + SlotOf(from, of_rank);
      return g.EpochBuffer(of_rank, epoch) + NoticeBytes(Size(), t.Blocks(), 1) +
             size_t{slot} * c.window * Packets::kBytes;
    }

    // Pack h of token p, at a place of all streams.
    struct Place {
      uint32_t p, h;
    };
    JIN_FN Place PlaceOf(uint32_t i) const { return {i / row_packs, i % row_packs}; }
    JIN_FN const int32_t* PlacesOf(int rank, uint32_t p) const {
      return c.places + (size_t(rank) * c.tokens + p) * c.choices;
    }
    // Choices of token p of a rank, from `first` on: the rows that they have here, or less than 0.
    struct Rows {
      int32_t row[kAtOnce];
    };
    JIN_FN Rows RowsOf(int rank, uint32_t p, uint32_t first) const {
      const int32_t* const at = PlacesOf(rank, p) + first;
      Rows rows;
      if (c.choices % kAtOnce == 0) {
        JIN_UNROLL
        for (uint32_t j = 0; j < kAtOnce; j += 4) {
          const Pack four = *reinterpret_cast<const Pack*>(at + j);
          memcpy(&rows.row[j], &four, sizeof four);
        }
      } else {
        JIN_UNROLL
        for (uint32_t j = 0; j < kAtOnce; ++j) rows.row[j] = first + j < c.choices ? at[j] : -1;
      }
      return rows;
    }
    JIN_FN static bool HasAny(const Rows& rows) {
      bool has = false;
      JIN_UNROLL
      for (uint32_t j = 0; j < kAtOnce; ++j) has |= rows.row[j] != -1;
      return has;
    }
    // Whether token p of a rank, whose first choices have these rows, has experts here.
    JIN_FN bool HasExpertsHere(int rank, uint32_t p, const Rows& rows) const {
      bool has = HasAny(rows);
      for (uint32_t first = kAtOnce; first < c.choices; first += kAtOnce) {
        has |= HasAny(RowsOf(rank, p, first));
      }
      return has;
    }
    // Whether token p of this rank has experts there.
    JIN_FN bool HasExpertsThere(int rank, uint32_t p) const {
      return (c.ranks[p] >> rank & 1) != 0;
    }

    // What is read or written once per call must not drive the windows out of a GPU's L2 cache.
    JIN_FN Pack Load(uint32_t row, uint32_t h) const {
      const char* const from = static_cast<const char*>(c.in) + size_t{row} * c.row_bytes;
#if defined(__CUDACC__)
      if (kCombines && c.aligned) {
        const uint4 v = __ldcs(reinterpret_cast<const uint4*>(from) + h);
        return {{v.x, v.y, v.z, v.w}};
      }
#endif
      return LoadInput(from, c.row_bytes, h, c.aligned);
    }
    JIN_FN void StoreRow(uint32_t row, uint32_t h, const Pack& pack) const {
      char* const to = static_cast<char*>(c.out) + size_t{row} * c.row_bytes;
#if defined(__CUDACC__)
      if (c.aligned) {
        const uint4 v{pack.word[0], pack.word[1], pack.word[2], pack.word[3]};
        return __stcs(reinterpret_cast<uint4*>(to) + h, v);
      }
#endif
      StoreOutput(to, c.row_bytes, h, c.aligned, pack);
    }
    JIN_FN Pack LoadToken(const Place& place) const {
      return SendableOf<Type>(t, Load(place.p, place.h));
    }

    // A dispatch: stores a pack of a token of a rank in all its rows, of which the first are
    // loaded.
    JIN_FN void StoreRows(int rank, const Place& place, Rows rows, const Pack& pack) const {
      for (uint32_t first = kAtOnce;; first += kAtOnce) {
        JIN_UNROLL
        for (uint32_t j = 0; j < kAtOnce; ++j) {
          const auto row = static_cast<uint32_t>(rows.row[j]);
          if (row < c.capacity) StoreRow(row, place.h, pack);
        }
        if (first >= c.choices) return;
        rows = RowsOf(rank, place.p, first);
      }
    }

    // A combine: what the experts of this rank have made of a pack of token p of a rank. False: the
    // token has none here.
    JIN_FN bool Partial(int rank, const Place& place, Pack* result) const {
      bool has = false;
      *result = WithType<Type>(t, [&](auto type) {
        using Each = decltype(type);
        typename Each::Sum sum, x;
        Each::Start(&sum, Pack{});
        const float* const weights = c.weights + (PlacesOf(rank, place.p) - c.places);
        for (uint32_t first = 0; first < c.choices; first += kAtOnce) {
          const Rows rows = RowsOf(rank, place.p, first);
          has |= HasAny(rows);
          Pack pack[kAtOnce];
          float weight[kAtOnce];
          JIN_UNROLL
          for (uint32_t j = 0; j < kAtOnce; ++j) {  // all loads before the first sum
            const auto row = static_cast<uint32_t>(rows.row[j]);
            if (row >= c.capacity) continue;
            pack[j] = Load(row, place.h);
            weight[j] = weights[first + j];
          }
          JIN_UNROLL
          for (uint32_t j = 0; j < kAtOnce; ++j) {
            if (static_cast<uint32_t>(rows.row[j]) >= c.capacity) continue;
            Each::Start(&x, pack[j]);
            JIN_UNROLL
            for (size_t k = 0; k < sizeof(sum.lane) / sizeof(float); ++k) {
              sum.lane[k] = Plus(sum.lane[k], Times(weight[j], x.lane[k]));
            }
          }
        }
        return SendableOf<Type>(t, Each::Round(sum));
      });
      return has;
    }

    // Whether a place of the stream to a rank has a pack. A combine makes it here.
    JIN_FN bool Makes(int to, const Place& place, Pack* pack) const {
      if constexpr (kCombines) return Partial(to, place, pack);
      return HasExpertsThere(to, place.p);
    }

    // Sends the notices and the first packs of all streams, and clears the rows without tokens.
    JIN_FN void Begin() const {
      t.Admit();
      for (int r = t.Thread(); r < Size(); r += t.Threads()) {
        if (r != g.rank) FlaggedPackets::Put(Notice(r, g.rank), 0, Pack{});
      }
      const auto first = static_cast<uint32_t>(t.First()),
                 stride = static_cast<uint32_t>(t.Stride());
      for (uint32_t i = first; i < ahead && i < places; i += stride) {
        const Place place = PlaceOf(i);
        Pack pack;
        if constexpr (!kCombines) pack = LoadToken(place);
        for (int k = 1; k < Size(); ++k) {
          const int to = Ranks<N>::After(g.rank, k, g.size);
          if (Makes(to, place, &pack)) Packets::Put(Window(to, g.rank, 0), i, pack);
        }
      }
      if constexpr (!kCombines) {
        const size_t begin = size_t{static_cast<uint32_t>(*c.used)} * row_packs;
        for (size_t i = begin + first; i < size_t{c.capacity} * row_packs; i += stride) {
          StoreRow(static_cast<uint32_t>(i / row_packs), static_cast<uint32_t>(i % row_packs),
                   Pack{});
        }
      }
    }

    // Goes through the places of window w: sends what is `ahead` of them, and takes what has come.
    JIN_FN bool Exchange(uint32_t w) const {
      const uint32_t first = w * window, left = places - first;
      const size_t from_unit = t.First();  // where it is resumed: of which peer, what, and where
      auto j = static_cast<uint32_t>(from_unit);
      int k = static_cast<int>(from_unit >> 32 & 0xFF) + 1;
      bool only_take = from_unit >> 40 != 0;
      uint32_t has_room = 0;  // by rank
      uint32_t room_of = w;   // a window
      for (; j < window && j < left; j += static_cast<uint32_t>(t.Stride())) {
        const uint32_t i = first + j;
        const bool next = j + ahead >= window;
        const uint32_t to_window = w + next, at = j + ahead - (next ? window : 0);
        if (room_of != to_window) has_room = 0;
        room_of = to_window;
        const Place place = PlaceOf(i);
        Pack own;  // loaded before the first store
        Rows own_rows;
        if constexpr (!kCombines) {
          own = LoadToken(place);
          own_rows = RowsOf(g.rank, place.p, 0);
        }
        if (!only_take && i + ahead < places) {
          const Place sent = PlaceOf(i + ahead);
          Pack pack;
          if constexpr (!kCombines) pack = LoadToken(sent);
          for (; k < Size(); ++k) {
            const int to = Ranks<N>::After(g.rank, k, g.size);
            if (!Makes(to, sent, &pack)) continue;
            while (to_window >= 2 && (has_room >> to & 1) == 0) {
              if (HasTaken(g, to, t.Block(), to_window - 1)) {
                has_room |= 1u << to;
              } else if (!t.Wait(size_t(k - 1) << 32 | j, to)) {
                return false;
              }
            }
            Packets::Put(Window(to, g.rank, to_window), at, pack);
          }
        }
        if (!only_take) k = 1;
        only_take = false;
        if constexpr (kCombines) {
          if (!TakeSum(place, w, j)) return false;
        } else {
          for (; k < Size(); ++k) {
            const int from = Ranks<N>::After(g.rank, Size() - k, g.size);
            const Rows rows = RowsOf(from, place.p, 0);
            if (k == 1) StoreRows(g.rank, place, own_rows, own);
            if (!HasExpertsHere(from, place.p, rows)) continue;
            char* const slot = Window(g.rank, from, w);
            Pack pack;
            while (!Packets::TryGet(slot, j, &pack)) {
              if (!t.Wait(size_t{1} << 40 | size_t(k - 1) << 32 | j, from)) return false;
            }
            Packets::Arm(slot, j);
            StoreRows(from, place, rows, pack);
          }
        }
        k = 1;
      }
      t.Arrived();  // each window is waited for by itself
      return true;
    }

    // Tells that window w has been taken; before that hears the notices. So a rank that is told has
    // begun this call, and cleared what it was told in the last one.
    JIN_FN bool Tell(uint32_t w) const {
      t.Sync();  // every thread of the block has armed what it received
      for (int r = t.FirstUpdate(); r < Size(); r += t.Threads()) {
        if (r == g.rank) continue;
        if (w == 0) {
          Pack notice;
          while (!FlaggedPackets::TryGet(Notice(g.rank, r), 0, &notice)) {
            if (!t.Wait(r, r)) return false;
          }
          FlaggedPackets::Arm(Notice(g.rank, r), 0);
        }
        if (places - w * window > 2 * window) TellTaken(g, r, t.Block(), w + 1);
      }
      return true;
    }

    // A combine: waits for the packs of all ranks that have experts of the token, and adds them.
    JIN_FN bool TakeSum(const Place& place, uint32_t w, uint32_t j) const {
      Pack all[Ranks<N>::kSlots];
      const auto ranks = static_cast<uint32_t>(c.ranks[place.p]);
      const auto has = [&](int r) { return Ranks<N>::Has(r, g.size) && (ranks >> r & 1) != 0; };
      Pack own;
      if (has(g.rank)) Partial(g.rank, place, &own);
      for (;;) {
        int missing = -1;
        JIN_UNROLL
        for (int r = 0; r < Ranks<N>::kSlots; ++r) {
          if (r == g.rank || !has(r)) continue;
          if (!Packets::TryGet(Window(g.rank, r, w), j, &all[r])) missing = r;
        }
        if (missing < 0) break;
        if (!t.Wait(size_t{1} << 40 | j, missing)) return false;
      }
      const Pack total = WithType<Type>(t, [&](auto type) {
        using Each = decltype(type);
        typename Each::Sum sum;
        Each::Start(&sum, Pack{});
        JIN_UNROLL
        for (int r = 0; r < Ranks<N>::kSlots; ++r) {
          if (!has(r)) continue;
          if (r != g.rank) Packets::Arm(Window(g.rank, r, w), j);
          Each::Add(&sum, r == g.rank ? own : all[r]);
        }
        return Each::Round(sum);
      });
      StoreRow(place.p, place.h, total);
      return true;
    }

    // Hears that the last windows have been taken. The call had so many.
    JIN_FN bool Finish(uint32_t windows) const {
      if (windows <= 2) return true;
      t.Sync();  // no thread of the block looks for room any more
      for (int r = t.FirstUpdate(); r < Size(); r += t.Threads()) {
        if (r == g.rank) continue;
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
