// The watch: the processes of a mesh on one host notice within a second when one of them is gone.
//
// Each pair of processes has a connection, a Unix socket over which each has sent the other a pidfd
// of itself. One thread of each process, which never takes Python's lock, sleeps in epoll on all of
// them. It learns of a peer's end in three ways, and the first one counts:
//
//   - The socket ends. The kernel closes it early in a process's end, 20 ms after SIGKILL. But a
//     child that was forked without exec holds a copy, which may outlive its parent.
//   - The pidfd becomes readable. It always does, but only when the driver and the kernel have
//     freed the process's memory: 0.1 s after SIGKILL with 60 GB of a GPU, 3 s with 20 GB of pinned
//     host memory (one H100).
//   - /proc says that the process is exiting. The watch looks every kTick. It needs a pid that is
//     visible here; in another PID namespace the other two remain.
//
// A process whose watch thread has sent nothing for `silent` is stopped (SIGSTOP, a debugger) or
// gets no processor. Who waits for it gives up. When it is heard again, it is present again.
//
// Messages (peer_message.h). Each connection has one writer and one reader on each side, so packets
// arrive in the order in which they were sent. The hello is written by each side before the watch
// is armed, and read by the other before it is armed. From then on the owner's thread writes
// heartbeats, and a thread in Finish(), Fail() or Close() the other notices; a lock orders them.
//
// What decides about a peer has no sockets and is checked by a model (peer_record.h).
//
// A goodbye and the end of its process can't be confused: the socket is read until it is empty
// before an end or a silence is judged, and a packet that was sent before the process ended is in
// it by then. A goodbye that found the socket full is lost, and the end counts as a fault: the
// reader had not read for as long as it takes to fill the socket, so it was stopped.
//
// Locks: `dispatch_`, then `mutex_`. Whoever holds one of them takes no lock of Python's and runs
// no code of others but the sink's. fork() takes `mutex_` around the system call itself
// (pthread_atfork), when all of Python's hooks have run: a hook of others that ran under it could
// wait for a thread that waits for it. A forked child closes its copies of the sockets, so that
// they end with the parent.
//
// Who closes: each side closes its own descriptors, in Close() or when it has seen the peer's end.
// The thread looks up a descriptor's connection by a number that is never used again, so an event
// of a closed one finds nothing. Close() returns when no callback of its watch runs any more.
//
// Nobody trusts an address: the process that connects and the one that accepts both check that the
// other has the same user (SO_PEERCRED) and knows the secret, which travelled through JAX's
// key-value store. The address is in the abstract namespace: it is no file that a crash could leave
// behind, and it is random, so nobody can take it in advance.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "peer_event.h"

namespace jax_intranode {

class PeerWatch {
 public:
  struct Peer {
    int process;
    std::string address;
    std::vector<int64_t> device_ids;
  };
  // What became of a peer; for messages.
  struct Status {
    int process;
    int pid;
    PeerState state;
    bool ended;  // its process is no more
    std::string what;
  };

  // Listens at a new address. `process` is the number of this process.
  explicit PeerWatch(int process);
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  const std::string& address() const { return address_; }

  // Connects with all peers, which do the same at the same time. Throws std::runtime_error with
  // the reason if a peer can't be reached. `secret` has 32 bytes.
  void Connect(const std::vector<Peer>& peers, const std::string& secret, double timeout_s);

  // Begins to watch. To be called when all peers have connected: before, an end of a connection
  // does not mean anything. The thread calls `sink`.
  void Arm(PeerSink sink, double silent_s);

  // Tells the sink again of all peers that are not present: for communicators that are new.
  void Announce() const;

  // The program has come to its end, and nothing of it runs any more. Peers take a later end of
  // this process as in order, and calls that wait for it fail.
  void Finish();

  // This process ends because of a failure; the text says which. Its peers fail at once.
  void Fail(const std::string& text);

  // Says goodbye, because of shutdown(), and ends the watch.
  void Close();

  std::vector<Status> Peers() const;

  // Waits until something has happened to a peer of any watch since the number `seen`; returns the
  // number of what has happened so far.
  static uint64_t WaitForEvents(uint64_t seen, double timeout_s);

  // Ends all calls of WaitForEvents().
  static void WakeWaiting();

 private:
  struct Connection;
  struct State;
  class Thread;

  const int process_;
  std::string address_;
  std::shared_ptr<State> state_;
};

}  // namespace jax_intranode
