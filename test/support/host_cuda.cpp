// Runs a CUDA kernel on the host, thread after thread: -DKERNEL_FILE="x.cu" -DKERNELS='X(name) X(name)'. Each kernel becomes
// `host_NAME`, a pointer to a function (grid_x, grid_y, block_x, block_y, the kernel's own arguments...).
#include <cstddef>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline

struct Index { unsigned x, y; };
static thread_local Index blockIdx, blockDim, threadIdx;

// IEEE 754 binary32 to binary16, to nearest, ties to even (finite and infinite values).
static unsigned short half_bits(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    const unsigned sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds to 65536 or more
    int exponent = int(magnitude >> 23) - 112;          // as half counts it; below 1: subnormal
    const unsigned mantissa = (magnitude & 0x7fffff) | 0x800000;
    const int shift = exponent < 1 ? 14 - exponent : 13;
    if (shift > 24) return sign;
    if (exponent < 1) exponent = 1;
    unsigned half = mantissa >> shift;
    const unsigned rest = mantissa & ((1u << shift) - 1), tie = 1u << (shift - 1);
    if (rest > tie || (rest == tie && (half & 1))) ++half;
    return sign | ((exponent - 1) * 1024 + half);  // the mantissa's leading bit adds 1 to the exponent
}

#include KERNEL_FILE

template <auto Kernel> struct Host;
template <class... Args, void (*Kernel)(Args...)> struct Host<Kernel> {
    static void run(unsigned grid_x, unsigned grid_y, unsigned block_x, unsigned block_y, Args... args) {
        blockDim = {block_x, block_y};
        for (blockIdx.y = 0; blockIdx.y < grid_y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < grid_x; ++blockIdx.x)
                for (threadIdx.y = 0; threadIdx.y < block_y; ++threadIdx.y)
                    for (threadIdx.x = 0; threadIdx.x < block_x; ++threadIdx.x) Kernel(args...);
    }
};
#define X(name) extern "C" { extern const auto host_##name = &Host<name>::run; }
KERNELS
