#include "collective_matmul.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>

#include "fused_matmul.h"
#include "slab.h"

namespace jax_intranode {
namespace {

constexpr int64_t kItemBytes = kMatmulElementBytes;
constexpr int64_t kAlignment = kScratchAlignment;

// Matmuls work on tiles of this many rows, or twice as many.
constexpr int64_t kRowsOfTile = 128;

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t RoundUp(int64_t a, int64_t b) { return DivideUp(a, b) * b; }

int64_t RowsIn(int64_t bytes, int64_t row_bytes) {
  if (bytes < row_bytes) {
    throw std::runtime_error("jax_intranode: a row of " + std::to_string(row_bytes) +
                             " bytes does not fit the " + std::to_string(bytes) +
                             " bytes that a ring has for it; JAX_INTRANODE_RING_MIB sets its size");
  }
  return bytes / row_bytes;
}

void Check(cudaError_t status) { ThrowIfError(status, "enqueueing a collective matmul"); }

char* At(void* start, int64_t items) { return static_cast<char*>(start) + items * kItemBytes; }
const char* At(const void* start, int64_t items) {
  return static_cast<const char*>(start) + items * kItemBytes;
}

}  // namespace

SideStreams& SideStreams::Of(int device) {
  static std::mutex mutex;
  static std::map<int, SideStreams*>* const all = new std::map<int, SideStreams*>;
  std::lock_guard lock(mutex);
  SideStreams*& streams = (*all)[device];
  if (streams == nullptr) {
    const CurrentDevice current(device);
    auto created = std::make_unique<SideStreams>();
    int lowest, highest;
    ThrowIfError(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "reading priorities");
    const auto create = [](SideStreams::Lane& lane, int priority) {
      ThrowIfError(cudaStreamCreateWithPriority(&lane.stream, cudaStreamNonBlocking, priority),
                   "creating a stream");
    };
    create(created->copy, highest);
    create(created->gate, highest);
    create(created->local, highest);
    for (Lane* lane : {&created->main, &created->copy, &created->gate, &created->local}) {
      ThrowIfError(cudaEventCreateWithFlags(&lane->event, cudaEventDisableTiming),
                   "creating an event");
    }
    for (auto* events : {&created->sent, &created->arrived}) {
      for (cudaEvent_t& event : *events) {
        ThrowIfError(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
      }
    }
    streams = created.release();
  }
  return *streams;
}

// Rows of a shard [outer, rows] that travel together: of `outers` outer indices the same rows, and
// of several outer indices all rows. They lie one after another in the shard.
struct MatmulSite::Piece {
  int64_t outer, outers;
  int64_t row, rows;

  int64_t count() const { return outers * rows; }
  int64_t first(int64_t rows_of_outer) const { return outer * rows_of_outer + row; }
};

MatmulSite::MatmulSite(const MatmulMember& member, Algorithm algorithm, const MatmulPlan& plan)
    : member_(member), algorithm_(algorithm), plan_(plan) {}

std::vector<MatmulSite::Piece> MatmulSite::Equal(const MatmulCall& call, int64_t most) const {
  std::vector<Piece> pieces;
  if (most >= call.rows) {
    const int64_t outers = DivideUp(call.outer, DivideUp(call.outer, most / call.rows));
    for (int64_t o = 0; o < call.outer; o += outers) {
      pieces.push_back({o, std::min(outers, call.outer - o), 0, call.rows});
    }
    return pieces;
  }
  // By a power of two, as dimensions are: tiles stay full.
  int64_t rows = call.rows;
  while (rows > most) rows = DivideUp(rows, 2);
  for (int64_t o = 0; o < call.outer; ++o) {
    for (int64_t row = 0; row < call.rows; row += rows) {
      pieces.push_back({o, 1, row, std::min(rows, call.rows - row)});
    }
  }
  return pieces;
}

std::vector<MatmulSite::Piece> MatmulSite::Halved(const Piece& piece, int cuts) const {
  std::vector<Piece> pieces;
  Piece rest = piece;
  const bool by_outers = piece.outers > 1;
  while (static_cast<int>(pieces.size()) + 1 < cuts && (by_outers ? rest.outers : rest.rows) > 1) {
    Piece first = rest;
    if (by_outers) {
      first.outers = DivideUp(rest.outers, 2);
      rest.outer += first.outers;
      rest.outers -= first.outers;
    } else {
      first.rows = DivideUp(rest.rows, 2);
      if (RoundUp(first.rows, kRowsOfTile) < rest.rows) {
        first.rows = RoundUp(first.rows, kRowsOfTile);
      }
      rest.row += first.rows;
      rest.rows -= first.rows;
    }
    pieces.push_back(first);
  }
  pieces.push_back(rest);
  return pieces;
}

std::vector<MatmulSite::Piece> MatmulSite::Arriving(const MatmulCall& call, int step) const {
  const int64_t room = member_.data_bytes() / kMinSlots / kAlignment;
  std::vector<Piece> pieces = Equal(call, RowsIn(room * kAlignment, call.k() * kItemBytes));
  if (step == member_.group.size - 1) {
    const Piece last = pieces.back();
    pieces.pop_back();
    for (const Piece& piece : Halved(last, plan_.last_pieces)) pieces.push_back(piece);
  }
  return pieces;
}

std::vector<MatmulSite::Piece> MatmulSite::Rounds(const MatmulCall& call) const {
  const int64_t room = member_.data_bytes() / (member_.group.size - 1) / kAlignment;
  return Equal(call, RowsIn(room * kAlignment, call.ns[0] * kItemBytes));
}

std::vector<MatmulSite::Piece> MatmulSite::Sent(const Piece& whole, bool first_round,
                                                int step) const {
  if (step == member_.group.size - 1) return Halved(whole, plan_.last_pieces);
  if (step > 1 || !first_round) return {whole};
  // The smallest first: as many rows as the last ones have.
  const std::vector<Piece> pieces = Halved(whole, plan_.first_pieces);
  std::vector<Piece> reversed;
  Piece next = whole;
  for (auto it = pieces.rbegin(); it != pieces.rend(); ++it) {
    next.outers = it->outers;
    next.rows = it->rows;
    reversed.push_back(next);
    whole.outers > 1 ? next.outer += it->outers : next.row += it->rows;
  }
  return reversed;
}

// A piece of the operand lies in a slot and its product among all rows; or the other way round.
MatmulShape MatmulSite::ShapeOf(const MatmulCall& call, size_t k, const Piece& piece) const {
  const int64_t all_rows = member_.group.size * call.rows;
  const bool gathers = algorithm_ == Algorithm::kAllGatherMatmul;
  MatmulShape shape{call.type, call.transposed, piece.outers, piece.rows, call.ns[k], call.k(), 0,
                    0};
  if (piece.outers > 1) {
    shape.a_stride = (gathers ? call.rows : all_rows) * call.k();
    shape.d_stride = (gathers ? all_rows : call.rows) * call.ns[k];
  }
  return shape;
}

size_t ScratchBytes(Algorithm algorithm, const MatmulCall& call, int size, const MatmulPlan& plan) {
  if (plan.fused()) return FusedScratchBytes(algorithm, call, size, plan);
  if (algorithm == Algorithm::kAllGatherMatmul) return kScratchBytes;
  return kScratchBytes + call.outer * size * call.rows * call.ns[0] * kItemBytes;
}

void MatmulSite::Prepare(const MatmulCall& call) const {
  if (plan_.fused()) return;
  const int size = member_.group.size;
  const auto choose = [&](size_t k, const Piece& piece) {
    Matmul::Of(member_.device, ShapeOf(call, k, piece));
  };
  if (algorithm_ == Algorithm::kMatmulReduceScatter) {
    const std::vector<Piece> rounds = Rounds(call);
    for (size_t round = 0; round < rounds.size(); ++round) {
      choose(0, rounds[round]);
      for (int step = 1; step < size; ++step) {
        for (const Piece& piece : Sent(rounds[round], round == 0, step)) choose(0, piece);
      }
    }
    return;
  }
  for (size_t k = 0; k < call.ws.size(); ++k) {
    choose(k, {0, call.outer, 0, call.rows});
    for (int step = 1; step < size; ++step) {
      for (const Piece& piece : Arriving(call, step)) choose(k, piece);
    }
  }
}

// One operation while it is enqueued.
class MatmulSite::Enqueuer {
 public:
  using Lane = SideStreams::Lane;

  Enqueuer(MatmulSite& site, const MatmulCall& call, cudaStream_t stream)
      : site_(site),
        call_(call),
        group_(site.member_.group),
        size_(group_.size),
        rank_(group_.rank),
        streams_(SideStreams::Of(site.member_.device)),
        main_{stream, streams_.main.event},
        own_(SignalsOf(group_, rank_)) {
    char* scratch = static_cast<char*>(call.scratch);
    workspace_ = scratch + RoundUp(reinterpret_cast<int64_t>(scratch), kAlignment) -
                 reinterpret_cast<int64_t>(scratch);
    partials_ = workspace_ + kMatmulWorkspaceBytes;
  }

  void Run() {
    std::lock_guard lock(streams_.mutex);
    for (const Lane* side : Sides()) After(main_, *side);
    try {
      const bool gathers = site_.algorithm_ == Algorithm::kAllGatherMatmul;
      gathers ? GatherAndMultiply() : MultiplyAndScatter();
    } catch (...) {
      // What has been enqueued uses the call's memory: main goes on after it.
      for (const Lane* side : Sides()) {
        cudaEventRecord(side->event, side->stream);
        cudaStreamWaitEvent(main_.stream, side->event, 0);
      }
      throw;
    }
    for (const Lane* side : Sides()) After(*side, main_);
    Check(CloseRing(Ring(), main_.stream));
  }

 private:
  std::vector<const Lane*> Sides() const {
    return {&streams_.copy, &streams_.gate, &streams_.local};
  }

  // What is enqueued on `later` from now on comes after what is on `earlier` now.
  void After(const Lane& earlier, const Lane& later) {
    Check(cudaEventRecord(earlier.event, earlier.stream));
    Check(cudaStreamWaitEvent(later.stream, earlier.event, 0));
  }

  RingHeader* Ring() const { return reinterpret_cast<RingHeader*>(site_.member_.ring[rank_]); }
  char* RingOf(int rank, int64_t offset) const { return site_.member_.Data(rank) + offset; }
  int RankAfter(int step) const { return (rank_ + step) % size_; }
  // The word in a peer's memory that grants it slot `slot` of this rank.
  uint32_t* GrantTo(int peer, int64_t slot) const {
    return &SignalsOf(group_, peer)->granted[rank_][slot];
  }

  // Grants, and waits for grants. Matmuls fill the GPU: they come after.
  void Meet(const Words& grants, const Words& granted) {
    Check(OpenRing(group_, site_.algorithm_, Ring(), grants, streams_.copy.stream));
    After(streams_.copy, main_);
    Exchange({}, granted, streams_.copy);
  }
  // Sets words of peers, then waits for words of this rank.
  void Exchange(const Words& told, const Words& awaited, const Lane& lane) {
    Check(PostAndAwait(group_, site_.algorithm_, told, awaited, lane.stream));
  }

  void Multiply(size_t k, const Piece& piece, const void* a, void* d) {
    Matmul::Of(site_.member_.device, site_.ShapeOf(call_, k, piece))
        .Enqueue(a, call_.ws[k], d, workspace_, main_.stream);
  }

  void Push(const void* from, int64_t bytes, char* to, size_t number) {
    Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, streams_.copy.stream));
    Check(cudaEventRecord(streams_.sent[number % kMaxSlots], streams_.copy.stream));
  }
  uint32_t* ArrivalAt(int peer, int64_t signal) const {
    return &SignalsOf(group_, peer)->arrived[rank_][signal];
  }

  // Where a piece of a rank lies among all rows.
  int64_t Gathered(int rank, const Piece& piece) const {
    return (piece.outer * size_ + rank) * call_.rows + piece.row;
  }

  // All-gather + matmul.

  struct Transfer {
    int step;
    Piece piece;
  };

  void Send(size_t q) {
    const Transfer& it = transfers_[q];
    const int to = RankAfter(size_ - it.step);
    const int64_t slot = q % slots_;
    if (q >= slots_) Exchange({}, One(&own_->granted[to][slot], to), streams_.copy);
    Push(At(call_.x(), it.piece.first(call_.rows) * call_.k()),
         it.piece.count() * call_.k() * kItemBytes, RingOf(to, slot * slot_bytes_), q);
  }
  // Tells of piece q, which has been sent, and waits for the one that arrives at the same time.
  void Receive(size_t q) {
    const Transfer& it = transfers_[q];
    const int from = RankAfter(it.step), to = RankAfter(size_ - it.step);
    const int64_t slot = q % slots_;
    Check(cudaStreamWaitEvent(streams_.gate.stream, streams_.sent[q % kMaxSlots], 0));
    Exchange(One(ArrivalAt(to, slot), to), One(&own_->arrived[from][slot], from), streams_.gate);
    Check(cudaEventRecord(ArrivalOf(q), streams_.gate.stream));
  }

  void CopyToGathered(int rank, const Piece& piece, const void* from) {
    const int64_t items = piece.rows * call_.k();
    const int64_t apart = size_ * call_.rows * call_.k();
    char* const to = At(call_.gathered, Gathered(rank, piece) * call_.k());
    if (piece.outers > 1 && apart * kItemBytes <= INT32_MAX) {  // the largest pitch that CUDA takes
      Check(cudaMemcpy2DAsync(to, apart * kItemBytes, from, items * kItemBytes, items * kItemBytes,
                              piece.outers, cudaMemcpyDefault, streams_.local.stream));
      return;
    }
    for (int64_t outer = 0; outer < piece.outers; ++outer) {
      Check(cudaMemcpyAsync(At(to, outer * apart), At(from, outer * items), items * kItemBytes,
                            cudaMemcpyDefault, streams_.local.stream));
    }
  }
  void MultiplyAll(int rank, const Piece& piece, const void* from) {
    for (size_t k = 0; k < call_.ws.size(); ++k) {
      Multiply(k, piece, from, At(call_.products[k], Gathered(rank, piece) * call_.ns[k]));
    }
  }

  void GatherAndMultiply() {
    int64_t most = 0;
    for (int step = 1; step < size_; ++step) {
      for (const Piece& piece : site_.Arriving(call_, step)) {
        transfers_.push_back({step, piece});
        most = std::max(most, piece.count());
      }
    }
    slot_bytes_ = RoundUp(most * call_.k() * kItemBytes, kAlignment);
    slots_ =
        std::min<size_t>({kMaxSlots, transfers_.size(), site_.member_.data_bytes() / slot_bytes_});
    Words grants{}, granted{};
    for (size_t q = 0; q < slots_; ++q) {
      const int to = RankAfter(size_ - transfers_[q].step);
      grants.Append(GrantTo(RankAfter(transfers_[q].step), q), rank_);
      granted.Append(&own_->granted[to][q], to);
    }
    Meet(grants, granted);
    Send(0);
    const Piece whole{0, call_.outer, 0, call_.rows};
    MultiplyAll(rank_, whole, call_.x());
    for (size_t q = 1; q < slots_; ++q) Send(q);
    for (size_t q = 0; q < slots_; ++q) Receive(q);
    if (call_.gathered != nullptr) CopyToGathered(rank_, whole, call_.x());
    for (size_t q = 0; q < transfers_.size(); ++q) {
      const Transfer& it = transfers_[q];
      const int from = RankAfter(it.step);
      const char* const at = RingOf(rank_, q % slots_ * slot_bytes_);
      Check(cudaStreamWaitEvent(main_.stream, ArrivalOf(q), 0));
      MultiplyAll(from, it.piece, at);
      if (call_.gathered != nullptr) {
        Check(cudaStreamWaitEvent(streams_.local.stream, ArrivalOf(q), 0));
        CopyToGathered(from, it.piece, at);
      }
      const size_t next = q + slots_;
      if (next < transfers_.size()) {
        After(streams_.local, main_);
        const int sender = RankAfter(transfers_[next].step);
        Check(Post(One(GrantTo(sender, q % slots_), rank_), main_.stream));
        After(main_, streams_.copy);
        Send(next);
        Receive(next);
      }
    }
  }

  // Matmul + reduce-scatter.

  void MultiplyAndScatter() {
    const int64_t row_bytes = call_.ns[0] * kItemBytes;
    const std::vector<Piece> rounds = site_.Rounds(call_);
    const int64_t share = RoundUp(rounds[0].count() * row_bytes, kAlignment);
    Words grants{}, granted{};
    for (int step = 1; step < size_; ++step) {
      const int peer = RankAfter(step);
      grants.Append(GrantTo(peer, 0), rank_);
      granted.Append(&own_->granted[peer][0], peer);
    }
    Meet(grants, granted);
    char* partial = partials_;
    for (size_t round = 0; round < rounds.size(); ++round) {
      if (round > 0) Exchange({}, granted, streams_.copy);
      for (int step = 1; step < size_; ++step) {
        const int to = RankAfter(step);
        int64_t rows = 0, signal = 0;
        for (const Piece& piece : site_.Sent(rounds[round], round == 0, step)) {
          const int64_t bytes = piece.count() * row_bytes;
          Multiply(0, piece, At(call_.x(), Gathered(to, piece) * call_.k()), partial);
          After(main_, streams_.copy);
          // Of the shares of a ring the first is that of the rank that sends to it last.
          Push(partial, bytes, RingOf(to, (size_ - 1 - step) * share + rows * row_bytes), signal);
          Check(cudaStreamWaitEvent(streams_.gate.stream, streams_.sent[signal], 0));
          Exchange(One(ArrivalAt(to, signal), to), {}, streams_.gate);
          Check(cudaEventRecord(ArrivalOf(signal), streams_.gate.stream));
          rows += piece.count();
          partial += bytes;
          ++signal;
        }
      }
      Multiply(0, rounds[round], At(call_.x(), Gathered(rank_, rounds[round]) * call_.k()),
               partial);
      After(main_, streams_.local);
      int64_t rows = 0;
      const std::vector<Piece> last = site_.Sent(rounds[round], round == 0, size_ - 1);
      for (size_t k = 0; k < last.size(); ++k) {
        // This rank's own pieces of the last step were sent with the same numbers.
        Check(cudaStreamWaitEvent(streams_.local.stream, ArrivalOf(k), 0));
        Exchange({}, Arrived(rounds[round], round == 0, k), streams_.local);
        Sum(last[k], partial + rows * row_bytes, share, rows * row_bytes);
        rows += last[k].count();
      }
      partial += rows * row_bytes;
      if (round + 1 < rounds.size()) {
        Check(Post(grants, streams_.local.stream));
        After(streams_.local, streams_.copy);
      }
    }
  }

  // The rank that sends to this one at its step `step`.
  int SenderAt(int step) const { return RankAfter(size_ - step); }

  // What tells that all products of piece k, of those of the last step, have arrived.
  Words Arrived(const Piece& whole, bool first_round, size_t k) const {
    Words words{};
    for (int step = 1; k == 0 && step < size_ - 1; ++step) {
      const int64_t pieces = site_.Sent(whole, first_round, step).size();
      const int from = SenderAt(step);
      for (int64_t i = 0; i < pieces; ++i) words.Append(&own_->arrived[from][i], from);
    }
    const int last = SenderAt(size_ - 1);
    words.Append(&own_->arrived[last][k], last);
    return words;
  }

  void Sum(const Piece& piece, const void* own, int64_t share, int64_t offset) {
    Partials partials{};
    partials.of_rank[rank_] = own;
    for (int step = 1; step < size_; ++step) {
      partials.of_rank[SenderAt(step)] = RingOf(rank_, (size_ - 1 - step) * share + offset);
    }
    const int64_t bytes = piece.count() * call_.ns[0] * kItemBytes;
    Check(SumPartials(call_.type, partials, size_,
                      At(call_.products[0], piece.first(call_.rows) * call_.ns[0]),
                      bytes / sizeof(Pack), streams_.local.stream));
  }

  static Words One(uint32_t* word, int of_rank) {
    Words words{};
    words.Append(word, of_rank);
    return words;
  }
  cudaEvent_t ArrivalOf(size_t q) const { return streams_.arrived[q % kMaxSlots]; }

  MatmulSite& site_;
  const MatmulCall& call_;
  const DeviceGroup& group_;
  const int size_, rank_;
  SideStreams& streams_;
  const Lane main_;
  Signals* const own_;
  char* workspace_;
  char* partials_;
  std::vector<Transfer> transfers_;
  size_t slots_ = 0;
  int64_t slot_bytes_ = 0;
};

void MatmulSite::Enqueue(const MatmulCall& call, cudaStream_t stream) {
  if (plan_.fused()) return LaunchFused(member_, algorithm_, plan_, call, stream);
  Enqueuer(*this, call, stream).Run();
}

}  // namespace jax_intranode
