// The monitor: what watches over the calls of this process and over its peers. One thread, which
// never takes Python's lock, so that a program that computes, compiles or debugs doesn't hold it
// up.
//
// It sleeps on the sockets of its peers, and looks every 250 ms. It learns of a peer's end in two
// ways, and the first one counts:
//
//   - The socket ends. The kernel closes it 20 ms after SIGKILL, but later if the process has much
//     host memory, which it frees before: 0.4 s with 20 GB of pinned memory (one H100). A child
//     that was forked past the C library holds a copy, which may outlive its parent.
//   - /proc says that the process is exiting, or is gone. It needs a pid that is visible here; in
//     another PID namespace the socket remains.
//
// A process whose monitor has sent nothing for `silent` is stopped (SIGSTOP, a debugger) or gets no
// processor. What follows from the state of a peer is in peer_table.h. The monitor makes the set of
// absent devices from the states of all peers, and hands it to the platforms (platform.h), whenever
// one of them changes. It also collects the waits of the platforms, tells peers of them, reports
// long ones (waits.h), and ends those that have reached their limit. Python takes what there is to
// say: jax_intranode/_src/health/failures.py.
//
// Messages (peer_message.h). Each connection has one writer and one reader on each side, so packets
// arrive in the order in which they were sent. A goodbye and the end of its process can't be
// confused: the socket is read until it is empty before an end or a silence is judged, and a packet
// that was sent before the process ended is in it by then. A goodbye that found the socket full is
// lost, and the end counts as a fault: the reader had not read for as long as it takes to fill the
// socket, so it was stopped.
//
// Locks: `dispatch_`, then `mutex_`, then those of the platforms. Whoever holds one of them takes
// no lock of Python's and runs no code of others. fork() takes `mutex_` around the system call
// itself (pthread_atfork), when all of Python's hooks have run: a hook of others that ran under it
// could wait for a thread that waits for it. A forked child closes its copies of the sockets, so
// that they end with the parent.
//
// Who closes: each side closes its own sockets, in Close() or when it has seen the peer's end. When
// Close() returns, no platform is told of its peers any more.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "failure.h"
#include "peer_record.h"
#include "peer_socket.h"
#include "platform.h"
#include "waits.h"

namespace jax_intranode {

// This process's watch over its peers in one mesh, from the rendezvous to shutdown().
class PeerWatch {
 public:
  struct Status {
    int process;
    int pid;
    PeerState state;
    bool ended;  // its process is no more; false for one that has left
    std::string what;
    bool in_barrier;
  };

  // Listens at a new address. `process` is the number of this process.
  explicit PeerWatch(int process);
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  const std::string& address() const { return socket_.address(); }

  // As PeerSocket::Connect().
  void Connect(const std::vector<PeerAddress>& peers, const std::string& secret, double timeout_s);

  // Begins to watch. To be called when all peers have connected: before, an end of a connection
  // does not mean anything.
  void Arm(Platform* platform, double silent_s);

  // The program has come to its end, and nothing of it runs any more. Peers take a later end of
  // this process as in order, and calls that wait for it fail. Until then a call of this process
  // takes it back, and the monitor tells it again when none has come for a while.
  void Finish();
  // Something of it runs all the same: takes Finish() back, until it is called again.
  void GoOn();

  // This process ends because of a failure; the text says which. Its peers fail at once, which is
  // no failure of this process.
  void Fail(const std::string& text);

  // Whether this process waits in JAX's last barrier: peers that end need not wait for it. When it
  // has left the barrier it may end without a word.
  void SetInBarrier(bool is_in_barrier);

  // Says goodbye, because of shutdown(), and ends the watch.
  void Close();

  std::vector<Status> Peers() const;

 private:
  friend class Monitor;
  struct Peer {
    Connection connection;
    PeerRecord record{};
    PeerState told = PeerState::kUnheard;  // what the platform knows
    bool is_quiet = false;                 // a silence has been reported
    bool in_barrier = false;               // it waits in JAX's last barrier
    bool may_end = false;                  // it has left that barrier

    std::string Name() const;
    std::string What(Clock::duration silent) const;
    bool Has(int64_t device) const;
  };

  void SendAll(PeerNotice notice, const std::string& text = "");
  void FinishAgain(Clock::time_point now, uint64_t calls, bool waits);

  PeerSocket socket_;
  // The lock of the monitor guards what follows.
  std::vector<Peer> peers_;
  Platform* platform_ = nullptr;
  Clock::duration silent_{};
  bool finishes_ = false;  // Finish() was called
  bool finished_ = false;  // and the peers have been told
  bool fails_ = false;     // Fail() was called
  uint64_t calls_ = 0;     // of handlers when this was looked at last
  Clock::time_point called_at_{};
};

class Monitor {
 public:
  static Monitor& Get();

  // Watches the calls of a platform from now on. `patience_s`: when a wait is reported.
  void Add(Platform* platform, double patience_s);

  // What there is to tell, each once: warnings, and whether one is of a wait.
  struct Warning {
    bool is_wait;
    std::string text;
  };
  std::vector<Warning> TakeWarnings();
  std::vector<Failure> TakeFailures();

  // Waits until there may be something to take, or for so long.
  void AwaitNews(double timeout_s);
  // Ends AwaitNews(), now and later.
  void EndNews();

 private:
  friend class PeerWatch;
  struct Port;
  using Peer = PeerWatch::Peer;

  void AfterForkInChild();
  void Include(Platform* platform);
  void Wake();
  void Run();
  void AwaitSockets(Clock::time_point end);
  void ReadAll();
  void Tick(Clock::time_point now, bool was_stopped);
  void SetAbsent();
  void Look(Clock::time_point now, Clock::duration stopped);
  void Collect();
  void AddDetail(Failure* failure);
  std::string DetailOf(int64_t device) const;
  uint64_t Calls() const;
  std::vector<Platform*> Platforms();
  void Warn(const std::string& text, bool is_wait = false);
  void Tell(std::vector<Failure> failures);

  bool is_forked_ = false;  // a forked child has no thread
  // Held while platforms are told. Taken before `mutex_`.
  std::mutex dispatch_;
  std::mutex mutex_;
  std::vector<Platform*> platforms_;
  std::vector<PeerWatch*> watches_;
  WaitReports reports_{[this](int64_t device) { return DetailOf(device); }};
  Clock::time_point last_beat_{};
  Clock::duration patience_ = kFirstReport;
  bool changed_ = false;  // a peer's state is new
  Fd wake_;
  // Taken last.
  std::mutex news_mutex_;
  std::condition_variable news_;
  std::vector<Warning> warnings_;
  std::vector<Failure> failures_;
  bool news_ended_ = false;
};

}  // namespace jax_intranode
