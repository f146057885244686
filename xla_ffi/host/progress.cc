#include "progress.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "host_group.h"

namespace jax_intranode {
namespace {

// Polls the groups with outstanding calls. Normally the thread in which the last rank arrives
// finishes a call. This thread finishes those whose peers are late.
class ProgressThread {
 public:
  ProgressThread() {
    std::thread([this] { Run(); }).detach();
  }

  void Watch(std::weak_ptr<HostGroup> group) {
    {
      std::lock_guard lock(mutex_);
      watched_.push_back(std::move(group));
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
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<HostGroup>> watched_;
};

// A thread pool that starts another thread whenever a task finds none idle.
class GrowingPool {
 public:
  void Run(std::function<void()> task) {
    std::unique_lock lock(mutex_);
    tasks_.push_back(std::move(task));
    if (tasks_.size() <= idle_) {
      changed_.notify_one();
      return;
    }
    try {
      std::thread([this] { Work(); }).detach();
      ++threads_;
    } catch (const std::system_error&) {
      // The system has no more threads: a busy one takes the task next, or else the caller runs it.
      if (threads_ > 0) return;
      std::function<void()> last = std::move(tasks_.back());
      tasks_.pop_back();
      lock.unlock();
      last();
    }
  }

 private:
  void Work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      changed_.wait_for(lock, std::chrono::seconds(5), [this] { return !tasks_.empty(); });
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

}  // namespace

// Never destroyed: their threads may outlive static destruction.
void Watch(std::weak_ptr<HostGroup> group) {
  static ProgressThread* const thread = new ProgressThread;
  thread->Watch(std::move(group));
}

void RunApart(std::function<void()> task) {
  static GrowingPool* const pool = new GrowingPool;
  pool->Run(std::move(task));
}

}  // namespace jax_intranode
