// The threads behind CPU groups: one that keeps outstanding calls moving, and some in which
// completed calls go on.
#pragma once

#include <functional>
#include <memory>

namespace jax_intranode {

class HostGroup;

// Has the progress thread look after `group` until it has no outstanding call.
void Watch(std::weak_ptr<HostGroup> group);

// Runs `task` in a thread of its own: it may block without holding up another task.
void RunApart(std::function<void()> task);

}  // namespace jax_intranode
