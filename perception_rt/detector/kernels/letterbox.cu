// Letterbox, bilinear scaling, colour conversion and normalisation in one pass: one thread for each pixel of the network's
// input, float32 or float16 [1, 3, dst_h, dst_w], channels B, G, R, (pixel - mean) / std.
//
// The twin of perception_rt/detector/preprocess.py. Grey levels are whole numbers here as there: the four source pixels are
// converted to BGR bytes, weighted in 1/2048, rounded once. OpenCV truncates in between, so the two differ by at most one
// grey level. Includes nothing, so that NVRTC, nvcc and (for tests) a host compiler take it as it is.
//
// perception_rt/detector/gpu_preprocess.py numbers the formats, orders the arguments and checks them. All products fit 32
// bits: src_w, src_h <= 32768; dst_w, dst_h <= 16384.

enum Format { BGR8, RGB8, MONO8, YUYV, UYVY, NV12 };

struct Pixel {
    int b, g, r;
};

// Where an output column (or row) lies among the source's: between `at` and `next`, `weight` / 2048 towards `next`.
struct Tap {
    int at, next, weight;
};

static const int ONE = 2048;

#ifdef __CUDACC__
static __device__ __forceinline__ unsigned short half_bits(float value)
{
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

static __device__ __forceinline__ void store(float *out, size_t index, float value) { out[index] = value; }

static __device__ __forceinline__ void store(unsigned short *out, size_t index, float value)
{
    out[index] = half_bits(value);
}

// Pixel centres map to pixel centres: (i + 0.5) * src / dst - 0.5, here as the fraction position / (2 * dst).
static __device__ __forceinline__ Tap tap(int i, int src, int dst)
{
    const int position = (2 * i + 1) * src - dst;
    if (position <= 0)
        return Tap{0, 0, 0};
    const int at = position / (2 * dst);
    if (at >= src - 1)
        return Tap{src - 1, src - 1, 0};
    const int rest = position - at * 2 * dst;
    return Tap{at, at + 1, (rest * ONE + dst) / (2 * dst)};
}

static __device__ __forceinline__ int byte_of(int fixed)
{
    const int value = (fixed + (1 << 19)) >> 20;
    return value < 0 ? 0 : value > 255 ? 255 : value;
}

// ITU-R BT.601, 16 to 235: the factors 1.164, 2.018, 0.391, 0.813, 1.596 (the three decimals that OpenCV has) times 2^20.
static __device__ __forceinline__ Pixel from_yuv(int y, int u, int v)
{
    const int luma = (y > 16 ? y - 16 : 0) * 1220542;
    u -= 128;
    v -= 128;
    return Pixel{byte_of(luma + 2116026 * u), byte_of(luma - 409993 * u - 852492 * v), byte_of(luma + 1673527 * v)};
}

static __device__ __forceinline__ Pixel load(const unsigned char *source, int format, int x, int y, int src_h, int step)
{
    const unsigned char *row = source + (size_t)y * step;
    switch (format) {
    case BGR8:
        return Pixel{row[3 * x], row[3 * x + 1], row[3 * x + 2]};
    case RGB8:
        return Pixel{row[3 * x + 2], row[3 * x + 1], row[3 * x]};
    case MONO8:
        return Pixel{row[x], row[x], row[x]};
    case YUYV: {
        const unsigned char *pair = row + 4 * (x / 2);
        return from_yuv(row[2 * x], pair[1], pair[3]);
    }
    case UYVY: {
        const unsigned char *pair = row + 4 * (x / 2);
        return from_yuv(row[2 * x + 1], pair[0], pair[2]);
    }
    default: {  // NV12: the rows of U, V pairs follow the last row of Y
        const unsigned char *pair = source + (size_t)(src_h + y / 2) * step + 2 * (x / 2);
        return from_yuv(row[x], pair[0], pair[1]);
    }
    }
}

static __device__ __forceinline__ int mix(int p00, int p01, int p10, int p11, int wx, int wy)
{
    const int upper = p00 * (ONE - wx) + p01 * wx;
    const int lower = p10 * (ONE - wx) + p11 * wx;
    return (upper * (ONE - wy) + lower * wy + ONE * ONE / 2) / (ONE * ONE);
}

template <class Value>
static __device__ __forceinline__ void letterbox(
    const unsigned char *source, Value *out, int format, int src_w, int src_h, int step, int dst_w, int dst_h, int new_w,
    int new_h, int left, int top, int pad_value, float mean_b, float mean_g, float mean_r, float std_b, float std_g,
    float std_r)
{
    const int x = blockIdx.x * blockDim.x + threadIdx.x;
    const int y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= dst_w || y >= dst_h)
        return;

    Pixel pixel = {pad_value, pad_value, pad_value};
    const int inner_x = x - left, inner_y = y - top;
    if (inner_x >= 0 && inner_x < new_w && inner_y >= 0 && inner_y < new_h) {
        const Tap h = tap(inner_x, src_w, new_w), v = tap(inner_y, src_h, new_h);
        const Pixel p00 = load(source, format, h.at, v.at, src_h, step);
        const Pixel p01 = load(source, format, h.next, v.at, src_h, step);
        const Pixel p10 = load(source, format, h.at, v.next, src_h, step);
        const Pixel p11 = load(source, format, h.next, v.next, src_h, step);
        pixel.b = mix(p00.b, p01.b, p10.b, p11.b, h.weight, v.weight);
        pixel.g = mix(p00.g, p01.g, p10.g, p11.g, h.weight, v.weight);
        pixel.r = mix(p00.r, p01.r, p10.r, p11.r, h.weight, v.weight);
    }

    const size_t plane = (size_t)dst_w * dst_h, index = (size_t)y * dst_w + x;
    store(out, index, (pixel.b - mean_b) / std_b);
    store(out, index + plane, (pixel.g - mean_g) / std_g);
    store(out, index + 2 * plane, (pixel.r - mean_r) / std_r);
}

extern "C" __global__ void letterbox_float32(
    const unsigned char *__restrict__ source, float *__restrict__ out, int format, int src_w, int src_h, int step, int dst_w,
    int dst_h, int new_w, int new_h, int left, int top, int pad_value, float mean_b, float mean_g, float mean_r, float std_b,
    float std_g, float std_r)
{
    letterbox(source, out, format, src_w, src_h, step, dst_w, dst_h, new_w, new_h, left, top, pad_value, mean_b, mean_g,
              mean_r, std_b, std_g, std_r);
}

extern "C" __global__ void letterbox_float16(
    const unsigned char *__restrict__ source, unsigned short *__restrict__ out, int format, int src_w, int src_h, int step,
    int dst_w, int dst_h, int new_w, int new_h, int left, int top, int pad_value, float mean_b, float mean_g, float mean_r,
    float std_b, float std_g, float std_r)
{
    letterbox(source, out, format, src_w, src_h, step, dst_w, dst_h, new_w, new_h, left, top, pad_value, mean_b, mean_g,
              mean_r, std_b, std_g, std_r);
}
