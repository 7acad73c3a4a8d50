// How the system treats a signal, kept while Python changes the note of its handler: signal.signal() sets that anew, too, and
// calls of the system would no longer be taken up again after the signals of an event loop.
#pragma once

#include <csignal>

namespace asyncmem {

#ifdef SA_RESTART
using Treatment = struct sigaction;
inline void keep(int number, Treatment& kept) { sigaction(number, nullptr, &kept); }
inline void restore(int number, const Treatment& kept) { sigaction(number, &kept, nullptr); }
#else
struct Treatment {};
inline void keep(int, Treatment&) {}
inline void restore(int, const Treatment&) {}
#endif

}  // namespace asyncmem
