// Device memory: bytes of one unnamed file stand for the chips, one reserved address range for the addresses.
#pragma once

#include <cstdint>
#include <map>

// Free ranges of some numbers, handed out lowest first so that what was given back comes again soon.
class Ranges {
   public:
    Ranges(std::uint64_t start, std::uint64_t nbytes) { free_[start] = nbytes; }
    std::uint64_t take(std::uint64_t nbytes, std::uint64_t alignment);  // 0: there is none
    void give(std::uint64_t start, std::uint64_t nbytes);

   private:
    std::map<std::uint64_t, std::uint64_t> free_;
};

class Space {
   public:
    Space();
    std::uint64_t reserve(std::uint64_t nbytes, std::uint64_t alignment);  // 0: no addresses left
    void release(std::uint64_t address, std::uint64_t nbytes);
    std::uint64_t create(std::uint64_t nbytes);  // bytes of the file, by their offset
    void destroy(std::uint64_t offset, std::uint64_t nbytes);
    void map(std::uint64_t address, std::uint64_t nbytes, std::uint64_t offset, bool usable);
    void protect(std::uint64_t address, std::uint64_t nbytes, bool usable);
    void unmap(std::uint64_t address, std::uint64_t nbytes);
    bool within(std::uint64_t address) const;  // whether it can be a device address at all

   private:
    int file_;
    std::uint64_t nbytes_ = 0, base_;
    Ranges addresses_, chips_;
};
