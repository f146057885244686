#include "progress.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "host_group.h"

namespace jax_intranode {
namespace {

// Whether the system had a thread for `run`.
template <class Run>
bool TryThread(const Run& run) {
  try {
    std::thread(run).detach();
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

// Polls the groups with outstanding calls. Normally the thread in which the last rank arrives
// finishes a call. This thread finishes those whose peers are late.
class ProgressThread {
 public:
  void Watch(std::weak_ptr<HostGroup> group) {
    {
      std::lock_guard lock(mutex_);
      watched_.push_back(std::move(group));
      // The looks of the monitor advance the groups until there is a thread.
      if (!runs_) runs_ = TryThread([this] { Run(); });
    }
    changed_.notify_one();
  }

 private:
  void Run() {
    std::vector<std::weak_ptr<HostGroup>> groups;
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        if (groups.empty()) changed_.wait(lock, [this] { return !watched_.empty(); });
        for (auto& group : watched_) groups.push_back(std::move(group));
        watched_.clear();
      }
      std::erase_if(groups, [](const std::weak_ptr<HostGroup>& weak) {
        const std::shared_ptr<HostGroup> group = weak.lock();
        if (!group) return true;
        group->Progress();
        return !group->IsOutstanding();
      });
      std::this_thread::sleep_for(kPollsEvery);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<HostGroup>> watched_;
  bool runs_ = false;
};

// A thread pool that starts another thread whenever a task finds none idle.
class GrowingPool {
 public:
  // Whether an idle or a new thread takes the task.
  bool TryRun(std::function<void()>& task) {
    std::lock_guard lock(mutex_);
    const bool is_idle = tasks_.size() < idle_;
    if (!is_idle && !TryThread([this] { Work(); })) return false;
    threads_ += is_idle ? 0 : 1;
    tasks_.push_back(std::move(task));
    changed_.notify_one();
    return true;
  }
  // If none does, a busy one takes it next, or else the caller runs it.
  void Run(std::function<void()> task) {
    if (TryRun(task)) return;
    std::unique_lock lock(mutex_);
    if (threads_ > 0) return tasks_.push_back(std::move(task));
    lock.unlock();
    task();
  }

 private:
  void Work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      changed_.wait_for(lock, kIdleThreadStays, [this] { return !tasks_.empty(); });
      --idle_;
      if (tasks_.empty()) {
        --threads_;
        return;
      }
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;
  size_t threads_ = 0;
};

// Never destroyed: its threads may outlive static destruction. So may the other one.
GrowingPool& Pool() {
  static GrowingPool* const pool = new GrowingPool;
  return *pool;
}

}  // namespace

void Watch(std::weak_ptr<HostGroup> group) {
  static ProgressThread* const thread = new ProgressThread;
  thread->Watch(std::move(group));
}

bool TryRunApart(std::function<void()> task) { return Pool().TryRun(task); }
void RunApart(std::function<void()> task) { Pool().Run(std::move(task)); }

}  // namespace jax_intranode
