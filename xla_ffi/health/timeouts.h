// All times of the C++ code that no user sets: how often it looks, how long it waits. Kernels,
// those of users too, have their own in jax_intranode/include/jax_intranode/device.h.
#pragma once

#include <chrono>

namespace jax_intranode {

using Clock = std::chrono::steady_clock;

// The monitor (monitor.h): how often it looks, and tells the peers that this process runs.
constexpr auto kTick = std::chrono::milliseconds(250);
constexpr auto kHeartbeat = std::chrono::seconds(1);
// After such a gap between two ticks this process was stopped itself: waits don't count it.
constexpr auto kStopped = std::chrono::seconds(1);
// After such a gap it can't judge others.
constexpr auto kOwnGap = std::chrono::seconds(5);
// When a silence is reported.
constexpr auto kQuiet = std::chrono::seconds(10);
// When a process that has taken back that it has finished tells it again.
constexpr auto kFinishesAgain = std::chrono::seconds(5);
// How long one who connects may take for its hello, and when one that could not be accepted is
// tried again (peer_socket.h).
constexpr auto kHelloPatience = std::chrono::seconds(2);
constexpr auto kAcceptsAgain = std::chrono::milliseconds(10);

// How long a call waits for a peer that may come back (peer_table.h). A peer that takes back that
// it has finished does so within the period of its monitor.
constexpr auto kPatience = std::chrono::seconds(3);

// Long waits (waits.h): when peers are told of one, and told again; when a note has become old:
// three have not come; when a wait is reported first, and then. When ranks that wait in different
// operations of one group give up.
constexpr auto kNoted = std::chrono::seconds(1);
constexpr auto kToldAgain = std::chrono::milliseconds(900);
constexpr auto kStale = std::chrono::seconds(3);
constexpr auto kFirstReport = std::chrono::seconds(10);
constexpr auto kSecondReport = std::chrono::minutes(1);
constexpr auto kLaterReports = std::chrono::minutes(5);
constexpr auto kMismatchEnds = std::chrono::seconds(300);

// How long after its last word a kernel's wait is over. Kernels that wait write every 10 ms.
constexpr auto kWaitIsOver = std::chrono::seconds(1);

// CPU devices: how long a call polls for late peers before it returns a future. Continuing from a
// future costs tens of microseconds. How often the thread polls that continues them, and how long a
// thread without work stays.
constexpr auto kPollsFor = std::chrono::microseconds(100);
constexpr auto kPollsEvery = std::chrono::microseconds(20);
constexpr auto kIdleThreadStays = std::chrono::seconds(5);

}  // namespace jax_intranode
