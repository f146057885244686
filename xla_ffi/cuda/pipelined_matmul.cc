#include "pipelined_matmul.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "../text.h"
#include "slab.h"

namespace jax_intranode {
namespace {

// cuBLASLt's matmuls work on tiles of this many rows, or of twice as many.
constexpr int64_t kMatmulTileRows = 128;

int64_t RoundUp(int64_t a, int64_t b) { return DivideUp(a, b) * b; }

int64_t RowsIn(int64_t bytes, int64_t row_bytes) {
  if (bytes < row_bytes) {
    throw RuntimeError("a row of ", row_bytes, " bytes does not fit the ", bytes,
                       " bytes that a ring has for it; JAX_INTRANODE_RING_MIB sets its size");
  }
  return bytes / row_bytes;
}

void Check(cudaError_t status) { ThrowIfError(status, "enqueueing a collective matmul"); }

// The address of an element.
char* At(void* start, int64_t element) {
  return static_cast<char*>(start) + element * kMatmulElementBytes;
}
const char* At(const void* start, int64_t element) {
  return static_cast<const char*>(start) + element * kMatmulElementBytes;
}

// The streams of a device in addition to XLA's own, with an event each.
struct SideStreams {
  struct Stream {
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;
  };
  Stream main;    // a call's own stream multiplies; only this event is kept
  Stream copy;    // pushes pieces to peers
  Stream signal;  // signals peers, and waits for them
  Stream local;   // copies or adds what has arrived
  cudaEvent_t sent[kMaxSlots], arrived[kMaxSlots];  // by number of the piece
  std::mutex mutex;                                 // an operation is enqueued as a whole

  static SideStreams& Of(int device);
};

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
    for (Stream* stream : {&created->copy, &created->signal, &created->local}) {
      ThrowIfError(cudaStreamCreateWithPriority(&stream->stream, cudaStreamNonBlocking, highest),
                   "creating a stream");
    }
    const auto create_event = [](cudaEvent_t* event) {
      ThrowIfError(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "creating an event");
    };
    for (Stream* stream : {&created->main, &created->copy, &created->signal, &created->local}) {
      create_event(&stream->event);
    }
    for (auto* events : {&created->sent, &created->arrived}) {
      for (cudaEvent_t& event : *events) create_event(&event);
    }
    streams = created.release();
  }
  return *streams;
}

// Rows of a shard [outer, rows] that travel together: the same rows of `outers` outer indices. If
// there are several outer indices, a piece has all rows of each. Its rows are contiguous in the
// shard.
struct Piece {
  int64_t outer, outers;
  int64_t row, rows;

  int64_t count() const { return outers * rows; }
  int64_t first(int64_t rows_of_outer) const { return outer * rows_of_outer + row; }
};

// How a call is divided into pieces; the same on all ranks.
class Pieces {
 public:
  Pieces(const MatmulMember& member, const MatmulPlan& plan, const MatmulCall& call)
      : size_(member.group.size), data_bytes_(member.data_bytes()), plan_(plan), call_(call) {}

  Piece Whole() const { return {0, call_.outer, 0, call_.rows}; }

  // All-gather: the pieces that arrive at a step. The last one of the last step is divided further.
  std::vector<Piece> Arriving(int step) const {
    std::vector<Piece> pieces =
        Equal(RowsIn(Aligned(data_bytes_ / kMinSlots), call_.k() * kMatmulElementBytes));
    if (step == size_ - 1) {
      const Piece last = pieces.back();
      pieces.pop_back();
      for (const Piece& piece : Halved(last, plan_.last_pieces)) pieces.push_back(piece);
    }
    return pieces;
  }

  // Reduce-scatter: the rows of each round: few enough that the products of all peers fit the ring.
  std::vector<Piece> Rounds() const {
    return Equal(RowsIn(Aligned(data_bytes_ / (size_ - 1)), call_.ns[0] * kMatmulElementBytes));
  }

  // Reduce-scatter: the pieces in which a round is sent at a step.
  std::vector<Piece> Sent(const Piece& round, bool first_round, int step) const {
    if (step == size_ - 1) return Halved(round, plan_.last_pieces);
    if (step > 1 || !first_round) return {round};
    // The smallest piece comes first: the sizes that Halved gives, in reverse order.
    const std::vector<Piece> pieces = Halved(round, plan_.first_pieces);
    std::vector<Piece> reversed;
    Piece next = round;
    for (auto it = pieces.rbegin(); it != pieces.rend(); ++it) {
      next.outers = it->outers;
      next.rows = it->rows;
      reversed.push_back(next);
      round.outers > 1 ? next.outer += it->outers : next.row += it->rows;
    }
    return reversed;
  }

 private:
  static int64_t Aligned(int64_t bytes) { return bytes / kScratchAlignment * kScratchAlignment; }

  // Divides the shard into equal pieces of at most `most` rows.
  std::vector<Piece> Equal(int64_t most) const {
    std::vector<Piece> pieces;
    if (most >= call_.rows) {
      const int64_t outers = DivideUp(call_.outer, DivideUp(call_.outer, most / call_.rows));
      for (int64_t o = 0; o < call_.outer; o += outers) {
        pieces.push_back({o, std::min(outers, call_.outer - o), 0, call_.rows});
      }
      return pieces;
    }
    // Divided by a power of two: then tiles stay full for the usual dimensions.
    int64_t rows = call_.rows;
    while (rows > most) rows = DivideUp(rows, 2);
    for (int64_t o = 0; o < call_.outer; ++o) {
      for (int64_t row = 0; row < call_.rows; row += rows) {
        pieces.push_back({o, 1, row, std::min(rows, call_.rows - row)});
      }
    }
    return pieces;
  }

  // Divides a piece into halves, then the second half, and so on, into at most `count` pieces.
  std::vector<Piece> Halved(const Piece& piece, int count) const {
    std::vector<Piece> pieces;
    Piece rest = piece;
    const bool by_outers = piece.outers > 1;
    while (static_cast<int>(pieces.size()) + 1 < count &&
           (by_outers ? rest.outers : rest.rows) > 1) {
      Piece first = rest;
      if (by_outers) {
        first.outers = DivideUp(rest.outers, 2);
        rest.outer += first.outers;
        rest.outers -= first.outers;
      } else {
        first.rows = DivideUp(rest.rows, 2);
        if (RoundUp(first.rows, kMatmulTileRows) < rest.rows) {
          first.rows = RoundUp(first.rows, kMatmulTileRows);
        }
        rest.row += first.rows;
        rest.rows -= first.rows;
      }
      pieces.push_back(first);
    }
    pieces.push_back(rest);
    return pieces;
  }

  const int size_;
  const int64_t data_bytes_;
  const MatmulPlan& plan_;
  const MatmulCall& call_;
};

// The matmul of a piece with w number `i`. In an all-gather the piece's rows lie in a slot and its
// products among those of all ranks; in a reduce-scatter it is the other way round.
MatmulShape ShapeOf(Algorithm algorithm, int size, const MatmulCall& call, size_t i,
                    const Piece& piece) {
  const int64_t all_rows = size * call.rows;
  const bool gathers = algorithm == Algorithm::kAllGatherMatmul;
  MatmulShape shape{call.type, call.transposed, piece.outers, piece.rows, call.ns[i], call.k(), 0,
                    0};
  if (piece.outers > 1) {
    shape.a_stride = (gathers ? call.rows : all_rows) * call.k();
    shape.d_stride = (gathers ? all_rows : call.rows) * call.ns[i];
  }
  return shape;
}

// One operation while it is enqueued. The classes below add what an all-gather and a reduce-scatter
// do.
class Operation {
 public:
  Operation(const MatmulMember& member, Algorithm algorithm, const MatmulPlan& plan,
            const MatmulCall& call, cudaStream_t stream)
      : member_(member),
        algorithm_(algorithm),
        call_(call),
        pieces_(member, plan, call),
        group_(member.group),
        size_(group_.size),
        rank_(group_.rank),
        streams_(SideStreams::Of(member.device)),
        main_{stream, streams_.main.event},
        own_(SignalsOf(group_, rank_)) {
    char* const scratch = static_cast<char*>(call.scratch);
    const int64_t address = reinterpret_cast<int64_t>(scratch);
    workspace_ = scratch + RoundUp(address, kScratchAlignment) - address;
    partials_ = workspace_ + kMatmulWorkspaceBytes;
  }
  virtual ~Operation() = default;

  void Run() {
    std::lock_guard lock(streams_.mutex);
    for (const Stream* side : Sides()) After(main_, *side);
    try {
      Enqueue();
    } catch (...) {
      // What has been enqueued uses the call's memory: the call's stream must wait for it.
      for (const Stream* side : Sides()) {
        cudaEventRecord(side->event, side->stream);
        cudaStreamWaitEvent(main_.stream, side->event, 0);
      }
      throw;
    }
    for (const Stream* side : Sides()) After(*side, main_);
    Check(CloseRing(group_, algorithm_, OwnRing(), main_.stream));
  }

 protected:
  using Stream = SideStreams::Stream;

  virtual void Enqueue() = 0;

  std::vector<const Stream*> Sides() const {
    return {&streams_.copy, &streams_.signal, &streams_.local};
  }
  // What is enqueued on `later` from now on waits for what is on `earlier` now.
  void After(const Stream& earlier, const Stream& later) {
    Check(cudaEventRecord(earlier.event, earlier.stream));
    Check(cudaStreamWaitEvent(later.stream, earlier.event, 0));
  }
  cudaEvent_t ArrivalOf(size_t q) const { return streams_.arrived[q % kMaxSlots]; }

  int RankAfter(int step) const { return (rank_ + step) % size_; }
  RingHeader* OwnRing() const { return reinterpret_cast<RingHeader*>(member_.ring[rank_]); }
  char* RingOf(int rank, int64_t offset) const { return member_.Data(rank) + offset; }

  // The word in a peer's memory that grants it slot `slot` of this rank.
  uint32_t* GrantTo(int peer, int64_t slot) const {
    return &SignalsOf(group_, peer)->granted[rank_][slot];
  }
  // The word in a peer's memory that signals the arrival of this rank's piece `number`.
  uint32_t* ArrivalAt(int peer, int64_t number) const {
    return &SignalsOf(group_, peer)->arrived[rank_][number];
  }
  static Words One(uint32_t* word, int of_rank) {
    Words words{};
    words.Append(word, of_rank);
    return words;
  }

  // Makes the first grants and waits for those of the peers. Matmuls fill the GPU, so they come
  // after this.
  void Begin(const Words& grants, const Words& granted) {
    Check(OpenRing(group_, algorithm_, OwnRing(), grants, streams_.copy.stream));
    After(streams_.copy, main_);
    Exchange({}, granted, streams_.copy);
  }
  // Sets words of peers, then waits for words of this rank.
  void Exchange(const Words& posted, const Words& awaited, const Stream& on) {
    Check(PostAndAwait(group_, algorithm_, posted, awaited, on.stream));
  }

  void Multiply(size_t i, const Piece& piece, const void* a, void* d) {
    Matmul::Of(member_.device, ShapeOf(algorithm_, size_, call_, i, piece))
        .Enqueue(a, call_.ws[i], d, workspace_, main_.stream);
  }
  void Push(const void* from, int64_t bytes, char* to, size_t number) {
    Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, streams_.copy.stream));
    Check(cudaEventRecord(streams_.sent[number % kMaxSlots], streams_.copy.stream));
  }

  // The first row of a rank's piece among the rows of all ranks.
  int64_t Gathered(int rank, const Piece& piece) const {
    return (piece.outer * size_ + rank) * call_.rows + piece.row;
  }

  const MatmulMember& member_;
  const Algorithm algorithm_;
  const MatmulCall& call_;
  const Pieces pieces_;
  const DeviceGroup& group_;
  const int size_, rank_;
  SideStreams& streams_;
  const Stream main_;
  Signals* const own_;
  char* workspace_;
  char* partials_;
};

class AllGatherMatmul : public Operation {
 public:
  using Operation::Operation;

 private:
  // A piece that this rank sends and, with the same number, one that it receives.
  struct Transfer {
    int step;
    Piece piece;
  };

  void Enqueue() override {
    PlanTransfers();
    Words grants{}, granted{};
    for (size_t q = 0; q < slots_; ++q) {
      const int to = RankAfter(size_ - transfers_[q].step);
      grants.Append(GrantTo(RankAfter(transfers_[q].step), q), rank_);
      granted.Append(&own_->granted[to][q], to);
    }
    Begin(grants, granted);
    Send(0);
    const Piece whole = pieces_.Whole();
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

  void PlanTransfers() {
    int64_t most = 0;
    for (int step = 1; step < size_; ++step) {
      for (const Piece& piece : pieces_.Arriving(step)) {
        transfers_.push_back({step, piece});
        most = std::max(most, piece.count());
      }
    }
    slot_bytes_ = RoundUp(most * call_.k() * kMatmulElementBytes, kScratchAlignment);
    slots_ = std::min<size_t>({kMaxSlots, transfers_.size(), member_.data_bytes() / slot_bytes_});
  }

  void Send(size_t q) {
    const Transfer& it = transfers_[q];
    const int to = RankAfter(size_ - it.step);
    const int64_t slot = q % slots_;
    if (q >= slots_) Exchange({}, One(&own_->granted[to][slot], to), streams_.copy);
    Push(At(call_.x(), it.piece.first(call_.rows) * call_.k()),
         it.piece.count() * call_.k() * kMatmulElementBytes, RingOf(to, slot * slot_bytes_), q);
    if (!AwaitsGrants()) return;
    Check(Post(One(ArrivalAt(to, slot), to), streams_.copy.stream));
    Check(cudaEventRecord(streams_.sent[q % kMaxSlots], streams_.copy.stream));
  }
  // Signals the arrival of piece q, which has been sent, and waits for the one that arrives at the
  // same time.
  void Receive(size_t q) {
    const Transfer& it = transfers_[q];
    const int from = RankAfter(it.step), to = RankAfter(size_ - it.step);
    const int64_t slot = q % slots_;
    Check(cudaStreamWaitEvent(streams_.signal.stream, streams_.sent[q % kMaxSlots], 0));
    Exchange(AwaitsGrants() ? Words{} : One(ArrivalAt(to, slot), to),
             One(&own_->arrived[from][slot], from), streams_.signal);
    Check(cudaEventRecord(ArrivalOf(q), streams_.signal.stream));
  }
  // Whether slots are used again, so that copies wait for grants. Then each copy is followed by its
  // signal: on another stream the signal could be held up by the wait for the next grant.
  bool AwaitsGrants() const { return transfers_.size() > slots_; }

  void CopyToGathered(int rank, const Piece& piece, const void* from) {
    const int64_t elements = piece.rows * call_.k(), bytes = elements * kMatmulElementBytes;
    const int64_t apart = size_ * call_.rows * call_.k();
    const int64_t pitch = apart * kMatmulElementBytes;
    char* const to = At(call_.gathered, Gathered(rank, piece) * call_.k());
    if (piece.outers > 1 && pitch <= INT32_MAX) {  // the largest pitch that CUDA takes
      Check(cudaMemcpy2DAsync(to, pitch, from, bytes, bytes, piece.outers, cudaMemcpyDefault,
                              streams_.local.stream));
      return;
    }
    for (int64_t outer = 0; outer < piece.outers; ++outer) {
      Check(cudaMemcpyAsync(At(to, outer * apart), At(from, outer * elements), bytes,
                            cudaMemcpyDefault, streams_.local.stream));
    }
  }

  void MultiplyAll(int rank, const Piece& piece, const void* from) {
    for (size_t i = 0; i < call_.ws.size(); ++i) {
      Multiply(i, piece, from, At(call_.products[i], Gathered(rank, piece) * call_.ns[i]));
    }
  }

  std::vector<Transfer> transfers_;
  size_t slots_ = 0;
  int64_t slot_bytes_ = 0;
};

class MatmulReduceScatter : public Operation {
 public:
  using Operation::Operation;

 private:
  void Enqueue() override {
    const std::vector<Piece> rounds = pieces_.Rounds();
    share_ = RoundUp(rounds[0].count() * RowBytes(), kScratchAlignment);
    Words grants{}, granted{};
    for (int step = 1; step < size_; ++step) {
      const int peer = RankAfter(step);
      grants.Append(GrantTo(peer, 0), rank_);
      granted.Append(&own_->granted[peer][0], peer);
    }
    Begin(grants, granted);
    char* partial = partials_;
    for (size_t round = 0; round < rounds.size(); ++round) {
      if (round > 0) Exchange({}, granted, streams_.copy);
      partial = SendRound(rounds[round], round == 0, partial);
      partial = AddRound(rounds[round], round == 0, partial);
      if (round + 1 < rounds.size()) {
        Check(Post(grants, streams_.local.stream));
        After(streams_.local, streams_.copy);
      }
    }
  }

  int64_t RowBytes() const { return call_.ns[0] * kMatmulElementBytes; }
  const void* RowsOf(int rank, const Piece& piece) const {
    return At(call_.xs[0], Gathered(rank, piece) * call_.k());
  }

  // Multiplies the peers' rows of a round and sends the products. Takes scratch from `partial` on
  // and returns the rest.
  char* SendRound(const Piece& round, bool first_round, char* partial) {
    for (int step = 1; step < size_; ++step) {
      const int to = RankAfter(step);
      int64_t rows = 0, number = 0;
      for (const Piece& piece : pieces_.Sent(round, first_round, step)) {
        const int64_t bytes = piece.count() * RowBytes();
        Multiply(0, piece, RowsOf(to, piece), partial);
        After(main_, streams_.copy);
        Push(partial, bytes, RingOf(to, ShareOfStep(step) + rows * RowBytes()), number);
        Check(cudaStreamWaitEvent(streams_.signal.stream, streams_.sent[number], 0));
        Exchange(One(ArrivalAt(to, number), to), {}, streams_.signal);
        Check(cudaEventRecord(ArrivalOf(number), streams_.signal.stream));
        rows += piece.count();
        partial += bytes;
        ++number;
      }
    }
    return partial;
  }

  // Multiplies the rank's own rows of a round and adds the peers' products as they arrive.
  char* AddRound(const Piece& round, bool first_round, char* partial) {
    Multiply(0, round, RowsOf(rank_, round), partial);
    After(main_, streams_.local);
    int64_t rows = 0;
    const std::vector<Piece> last = pieces_.Sent(round, first_round, size_ - 1);
    for (size_t i = 0; i < last.size(); ++i) {
      // This rank's own pieces of the last step have the same numbers.
      Check(cudaStreamWaitEvent(streams_.local.stream, ArrivalOf(i), 0));
      Exchange({}, ArrivalsOf(round, first_round, i), streams_.local);
      Sum(last[i], partial + rows * RowBytes(), rows * RowBytes());
      rows += last[i].count();
    }
    return partial + rows * RowBytes();
  }

  // The share of the receiver's ring that a step has. The last step has the first one.
  int64_t ShareOfStep(int step) const { return (size_ - 1 - step) * share_; }
  // The rank that sends to this one at its step `step`.
  int SenderAt(int step) const { return RankAfter(size_ - step); }

  // The signals to wait for before the i-th piece of the last step is added: that piece of the last
  // sender, and before the first piece everything of the other senders.
  Words ArrivalsOf(const Piece& round, bool first_round, size_t i) const {
    Words words{};
    for (int step = 1; i == 0 && step < size_ - 1; ++step) {
      const int64_t count = pieces_.Sent(round, first_round, step).size();
      const int from = SenderAt(step);
      for (int64_t number = 0; number < count; ++number) {
        words.Append(&own_->arrived[from][number], from);
      }
    }
    const int last = SenderAt(size_ - 1);
    words.Append(&own_->arrived[last][i], last);
    return words;
  }

  // Adds the products of all ranks for a piece, `offset` bytes from the start of the round.
  void Sum(const Piece& piece, const void* own, int64_t offset) {
    Partials partials{};
    partials.of_rank[rank_] = own;
    for (int step = 1; step < size_; ++step) {
      partials.of_rank[SenderAt(step)] = RingOf(rank_, ShareOfStep(step) + offset);
    }
    Check(SumPartials(call_.type, partials, size_,
                      At(call_.products[0], piece.first(call_.rows) * call_.ns[0]),
                      piece.count() * RowBytes() / sizeof(Pack), streams_.local.stream));
  }

  int64_t share_ = 0;  // bytes of a ring that each sender has
};

}  // namespace

void CreateSideStreams(int device) { SideStreams::Of(device); }

size_t PipelineScratchBytes(Algorithm algorithm, const MatmulCall& call, int size) {
  if (algorithm == Algorithm::kAllGatherMatmul) return kPipelineScratchBytes;
  return kPipelineScratchBytes + call.outer * size * call.rows * call.ns[0] * kMatmulElementBytes;
}

void PreparePipeline(const MatmulMember& member, Algorithm algorithm, const MatmulPlan& plan,
                     const MatmulCall& call) {
  const int size = member.group.size;
  const Pieces pieces(member, plan, call);
  const auto choose = [&](size_t i, const Piece& piece) {
    Matmul::Of(member.device, ShapeOf(algorithm, size, call, i, piece));
  };
  if (algorithm == Algorithm::kMatmulReduceScatter) {
    const std::vector<Piece> rounds = pieces.Rounds();
    for (size_t round = 0; round < rounds.size(); ++round) {
      choose(0, rounds[round]);
      for (int step = 1; step < size; ++step) {
        for (const Piece& piece : pieces.Sent(rounds[round], round == 0, step)) choose(0, piece);
      }
    }
    return;
  }
  for (size_t i = 0; i < call.ws.size(); ++i) {
    choose(i, pieces.Whole());
    for (int step = 1; step < size; ++step) {
      for (const Piece& piece : pieces.Arriving(step)) choose(i, piece);
    }
  }
}

void EnqueuePipeline(const MatmulMember& member, Algorithm algorithm, const MatmulPlan& plan,
                     const MatmulCall& call, cudaStream_t stream) {
  if (algorithm == Algorithm::kAllGatherMatmul) {
    AllGatherMatmul(member, algorithm, plan, call, stream).Run();
  } else {
    MatmulReduceScatter(member, algorithm, plan, call, stream).Run();
  }
}

}  // namespace jax_intranode
