// What every driver call goes through: counting, faults and delays on demand, and the rules that hold for most.
#pragma once

#include <new>

#include "machine.hpp"

enum CallRules : unsigned {
    ANYWHERE = 0,
    IN_CONTEXT = 1,       // needs a current context
    UNSAFE = 2,           // must not happen while somebody captures, but in relaxed mode
    UNINITIALIZED = 4,    // works before cuInit
    WHEN_LOST = 8,        // works on a lost device
};

CUresult enter(const char* name, unsigned rules);  // before the lock
void check_rules(unsigned rules);                  // under it

template <class Body>
CUresult call(const char* name, unsigned rules, Body body) {
    if (const CUresult refused = enter(name, rules)) return refused;
    try {
        Lock lock(machine().mutex);
        my_lock = &lock;
        my_call = name;
        check_rules(rules);
        body(machine());
        return SUCCESS;
    } catch (const Refused& refused) {
        return refused.code;
    } catch (const std::bad_alloc&) {
        return OUT_OF_MEMORY;
    }
}

struct Export {
    Export(const char* base, int since, void* address);
};
void* exported(const char* base, int version, bool& known);
// Says by which name, and from which version of the interface on, cuGetProcAddress finds a function.
#define EXPORT(base, since, symbol) static const Export export_##symbol##_as_##base{#base, since, reinterpret_cast<void*>(&symbol)};
