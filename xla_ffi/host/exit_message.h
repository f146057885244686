// The failure of a process, as the last thing that it prints.
//
// After a CUDA context is lost, destructors of XLA print a hundred lines, after Python has printed
// the exception. So the message is printed once more, after all of them: by a destructor of this
// library, which the loader runs after the exit handlers and the destructors of static objects.
#pragma once

#include <string>

namespace jax_intranode {

// Sets the message; empty for none. It is printed to stderr if the process ends with an exit status
// other than 0, or `always`. A process that a signal ends, or os._exit, prints nothing.
void SetExitMessage(const std::string& message, bool always);

// To be called when the process begins to end. Python ends a thread that comes back from C++ after
// that by unwinding its stack, and C++ that must not be unwound then aborts the process: for
// instance a shutdown of JAX that waits for peers. From now on such a thread stops for ever.
void BeginExit();

}  // namespace jax_intranode
