// Finds memory that is touched without order, whatever the timing of this run.
//
// What merely happened to be finished in time orders nothing: two uses are in order when one stream did both, when an
// event ties the later stream to the earlier use, or when the host saw the earlier one done before it submitted the
// later one. So a missing wait is found even where it would have gone well.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "clock.hpp"

struct Use {
    std::uint64_t stream = 0, count = 0;  // stream 0: none; real ids start at 1
};

struct Cell {  // bytes up to `end` that were used alike
    std::uint64_t end;
    Use birth{};  // memory given out in the order of a stream is there for others behind that only
    Use write{};
    std::map<std::uint64_t, std::uint64_t> reads{};
};

class Checker {
   public:
    std::vector<std::string> violations;
    Clock host;  // what the host has seen done

    void name(std::uint64_t stream, std::string name) { names_[stream] = std::move(name); }
    // Memory is there from now on; with `birth`, in the order of that piece of a stream's work.
    void add(std::uint64_t start, std::uint64_t nbytes, Use birth = {});
    // Memory is there at a second address as well, with all that was done to it.
    void copy(std::uint64_t start, std::uint64_t nbytes, std::uint64_t to);
    // Memory goes away on the host's word, which asks no stream.
    void remove(std::uint64_t start, std::uint64_t nbytes, const char* call);
    // Memory goes away in the order of a stream, whose clock this is.
    void remove_behind(std::uint64_t start, std::uint64_t nbytes, const Clock& clock, Use doer, const char* call);
    // The work `doer`, certain to run behind `clock`, reads or writes a range. False where nothing is there.
    bool touch(std::uint64_t start, std::uint64_t nbytes, bool write, const Clock& clock, Use doer, const char* call);
    // Forget a range without a word: the device is lost, or the context died with everything in it.
    void drop(std::uint64_t start, std::uint64_t nbytes) { erase(start, start + nbytes); }

   private:
    using Cells = std::map<std::uint64_t, Cell>;
    Cells cells_;
    std::map<std::uint64_t, std::string> names_;

    void split(std::uint64_t at);
    void erase(std::uint64_t start, std::uint64_t end);
    bool whole(std::uint64_t start, std::uint64_t end);
    void check(const Cell& cell, std::uint64_t start, bool write, const Clock& clock, const char* call, Use doer);
    void report(const char* call, std::uint64_t start, std::uint64_t end, Use doer, const char* what, Use other);
    std::string called(std::uint64_t stream);
};
