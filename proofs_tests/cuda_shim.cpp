// The kernels of KERNELS (a .cu file) as a library for ctypes, or with SHIM_HOST_THREADS as a program that reads one
// launch from standard input and writes its arrays back.
#include "cuda_shim.h"

#include KERNELS

#include <string>
#include <type_traits>
#include <utility>

#ifdef SHIM_HOST_THREADS
#include <iostream>
#endif

namespace {

// What an argument looks like to the caller: p8 for a pointer to 8-byte elements, v4 for a value of 4 bytes.
template <typename Argument>
std::string kind() {
    if constexpr (std::is_pointer_v<Argument>) return "p" + std::to_string(sizeof(std::remove_pointer_t<Argument>));
    return "v" + std::to_string(sizeof(Argument));
}

struct Kernel {
    std::string name, signature;
    shim::Call call;
};

template <auto kernel, typename... Arguments, std::size_t... Index>
void unpack(void** arguments, void (*)(Arguments...), std::index_sequence<Index...>) {
    kernel(*static_cast<Arguments*>(arguments[Index])...);
}

template <auto kernel, typename... Arguments>
Kernel describe(const char* name, void (*pointer)(Arguments...)) {
    (void)pointer;
    std::string signature;
    ((signature += kind<Arguments>() + " "), ...);
    return {name, signature, [](void** arguments) {
                unpack<kernel>(arguments, kernel, std::index_sequence_for<Arguments...>());
            }};
}

#define DESCRIBE(kernel) describe<kernel>(#kernel, kernel)

const Kernel kernels[] = {DESCRIBE(select_beam_f32), DESCRIBE(select_beam_f64), DESCRIBE(prune_tree_f32),
                          DESCRIBE(prune_tree_f64), DESCRIBE(walk)};

const Kernel* find(const std::string& name) {
    for (const Kernel& kernel : kernels)
        if (kernel.name == name) return &kernel;
    return nullptr;
}

}  // namespace

extern "C" const char* shim_signature(const char* name) {
    const Kernel* kernel = find(name);
    return kernel ? kernel->signature.c_str() : nullptr;
}

extern "C" void shim_skip_barrier(int line) { shim::skipped_line = line; }

extern "C" void shim_launch(const char* name, unsigned blocks, unsigned threads, unsigned schedule, void** arguments) {
    const Kernel* kernel = find(name);
    if (!kernel) shim::fail("no such kernel");
    shim::run(blocks, threads, schedule, kernel->call, arguments);
}

#ifdef SHIM_HOST_THREADS
// Input: kernel, blocks, threads, line of the barrier to leave out (0: none), number of arguments, then for each its
// kind (p or v) and bytes, one line; after that the bytes of all. Output: the bytes of the pointers' arrays.
int main() {
    std::string name;
    unsigned blocks, threads, count;
    std::cin >> name >> blocks >> threads >> shim::skipped_line >> count;
    std::vector<std::string> kinds(count);
    std::vector<std::size_t> sizes(count);
    for (unsigned index = 0; index < count; ++index) std::cin >> kinds[index] >> sizes[index];
    std::cin.ignore();
    std::vector<std::vector<char>> bytes(count);
    std::vector<void*> pointers(count), arguments(count);
    for (unsigned index = 0; index < count; ++index) {
        bytes[index].resize(sizes[index]);
        std::cin.read(bytes[index].data(), static_cast<std::streamsize>(sizes[index]));
        pointers[index] = bytes[index].data();
        arguments[index] = kinds[index] == "p" ? static_cast<void*>(&pointers[index]) : pointers[index];
    }
    if (!std::cin) shim::fail("the launch on standard input is cut short");
    shim_launch(name.c_str(), blocks, threads, 0, arguments.data());
    for (unsigned index = 0; index < count; ++index)
        if (kinds[index] == "p") std::cout.write(bytes[index].data(), static_cast<std::streamsize>(sizes[index]));
}
#endif
