// The threads behind CPU groups: one that advances outstanding calls, and a pool in which XLA's
// programs continue after completed calls.
#pragma once

#include <functional>
#include <memory>

namespace jax_intranode {

class HostGroup;

// Makes the progress thread advance `group` until it has no outstanding call.
void Watch(std::weak_ptr<HostGroup> group);

// Runs `task` in a thread of its own: it may block without holding up another task. The first one
// returns false if there is no thread for it; the second one may then run it here.
bool TryRunApart(std::function<void()> task);
void RunApart(std::function<void()> task);

}  // namespace jax_intranode
