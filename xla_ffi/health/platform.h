// What the monitor (monitor.h) asks of the communicators of a platform, and tells them.
//
// The monitor lives in the module _host. The communicators of GPUs live in _cuda, another shared
// library of the same build; Python carries the pointer over. The monitor's thread calls these
// functions, and none of them may block: no call of CUDA.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "failure.h"
#include "peer_table.h"

namespace jax_intranode {

// A rank of this process waits for another rank.
struct Wait : Call {
  uint32_t present = 0;      // the ranks that are known to be in this call: one bit each
  Clock::duration waited{};  // without the time in which this process was stopped
  // The call: what the group's ranks compare.
  uint64_t site_number = 0;
  uint64_t count = 0;
  bool reported = false;  // whether the monitor reports it: one wait of a group
  // Whether the rank has made a call: then it waits in it, or has done so. Null: not known.
  std::function<bool(uint64_t site_number, uint64_t count)> has_called{};
  // Ends the wait, unless it has ended. Null: it ends itself at its limit, as kernels do.
  std::function<void(Failure)> give_up{};
};

class Platform {
 public:
  virtual bool OnGpu() const = 0;

  // All devices that are absent. What new communicators have to know, too.
  virtual void SetAbsent(const AbsentDevices& absent) = 0;

  // The waits of the ranks of this process; all long ones are among them. Gives up those that wait
  // for an absent rank (GivesUp() in peer_table.h). `stopped`: so long this process was stopped
  // since the last look.
  virtual std::vector<Wait> Look(Clock::time_point now, Clock::duration stopped) = 0;

  // The failures that this has not returned before. Any thread calls it.
  virtual std::vector<Failure> TakeFailures() = 0;

  // How many handlers have been called.
  virtual uint64_t Calls() = 0;

  // A kernel has failed, and with it the device on which it ran: ends the waits of all groups that
  // this device is in. Their later calls fail with the message.
  virtual void LoseDevice(const Failure&) {}
};

constexpr char kPlatformName[] = "jax_intranode.Platform";

}  // namespace jax_intranode
