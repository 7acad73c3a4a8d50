// A tool that listens to memory annotations, as compute-sanitizer does, and counts what it hears.
//
// The declarations are of the protocol, NVTX 3.0 with memory extension 1.2, written anew: the test is that both sides
// mean the same by it.
#include <cstddef>
#include <cstdint>

namespace {

struct Range {
    std::size_t size;
    const void* pointer;
};
struct Heap {
    std::uint16_t version, struct_size;
    std::uint32_t reserved, usage, type;
    std::size_t desc_size;
    const Range* desc;
    std::uint32_t category, message_type;
    const void* message;
};
struct Regions {
    std::uint16_t version, struct_size;
    std::uint32_t type;
    void* heap;
    std::size_t count, element_size;
    const Range* elements;
    void** handles_out;
};
struct References {
    std::uint16_t version, struct_size;
    std::uint32_t type;
    std::size_t count, element_size;
    const void* const* elements;
};
struct Functions {
    std::size_t number, count;
    std::intptr_t* slots;
};
struct Extension {
    std::uint16_t nvtx, struct_size, module, version;
    std::size_t segment_count;
    Functions* segments;
    void* get_export;
    const void* info;
};
struct Callbacks {
    std::size_t struct_size;
    int (*get_table)(int module, void**** table, unsigned* size);
};

int a_domain, a_heap;
long long heard[8]; // domains, heaps, ended heaps, regions, ended regions, what was malformed, bytes, last address

bool well_formed(std::uint16_t version, std::uint16_t given, std::size_t size) {
    const bool right = version == 0x0102 && given == size;
    heard[5] += !right;
    return right;
}

void* create_domain(const char* name) {
    heard[0] += name[0] == 'a';
    return &a_domain;
}

void* register_heap(void* domain, const Heap* heap) {
    if (well_formed(heap->version, heap->struct_size, sizeof *heap)) {
        heard[5] += domain != &a_domain || heap->usage != 1 || heap->type != 1 || heap->desc_size != sizeof(Range);
        heard[1]++;
        heard[6] += static_cast<long long>(heap->desc->size);
        heard[7] = reinterpret_cast<long long>(heap->desc->pointer);
    }
    return &a_heap;
}

void unregister_heap(void* domain, void* heap) {
    heard[5] += domain != &a_domain || heap != &a_heap;
    heard[2]++;
}

void register_regions(void* domain, const Regions* regions) {
    if (well_formed(regions->version, regions->struct_size, sizeof *regions)) {
        heard[5] += domain != &a_domain || regions->heap != &a_heap || regions->type != 1;
        heard[5] += regions->count != 1 || regions->element_size != sizeof(Range);
        heard[3]++;
        heard[6] += static_cast<long long>(regions->elements->size);
        heard[7] = reinterpret_cast<long long>(regions->elements->pointer);
    }
}

void unregister_regions(void* domain, const References* regions) {
    if (well_formed(regions->version, regions->struct_size, sizeof *regions)) {
        heard[5] += domain != &a_domain || regions->type != 1 || regions->count != 1;
        heard[5] += regions->element_size != sizeof(void*);
        heard[4]++;
        heard[7] = reinterpret_cast<long long>(regions->elements[0]);
    }
}

} // namespace

extern "C" {

int InitializeInjectionNvtx2(const void* (*get_export)(std::uint32_t)) {
    auto* callbacks = static_cast<const Callbacks*>(get_export(1));
    void*** table = nullptr;
    unsigned size = 0;
    if (get_export(2) != nullptr || callbacks->struct_size != sizeof *callbacks || callbacks->get_table(7, &table, &size))
        return 0;
    if (!callbacks->get_table(5, &table, &size) || size != 16 || table[0] != nullptr || table[size] != nullptr)
        return 0;
    *table[12] = reinterpret_cast<void*>(create_domain);
    return 1;
}

#ifndef NO_EXTENSION
int InitializeInjectionNvtxExtension(Extension* extension) {
    if (extension->module != 1 || extension->version != 0x0102 || extension->struct_size != sizeof *extension) return 0;
    std::intptr_t* slots = extension->segments->slots;
    slots[0] = reinterpret_cast<std::intptr_t>(register_heap);
    slots[1] = reinterpret_cast<std::intptr_t>(unregister_heap);
    slots[3] = reinterpret_cast<std::intptr_t>(register_regions);
    slots[5] = reinterpret_cast<std::intptr_t>(unregister_regions);
    return 1;
}
#endif

const long long* what_was_heard() { return heard; }
}
