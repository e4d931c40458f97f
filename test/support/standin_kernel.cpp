// TEST CODE. The preprocess kernel, compiled for the host, in the form that the stand-in driver launches.
#include "host_cuda.cpp"

extern "C" void standin_letterbox_float32(const void *packed, const unsigned *grid, const unsigned *block) {
    struct { const unsigned char *source; float *out; int i[11]; float f[6]; } a;
    std::memcpy(&a, packed, 2 * sizeof(void *) + sizeof a.i + sizeof a.f);
    host_letterbox_float32(grid[0], grid[1], block[0], block[1], a.source, a.out, a.i[0], a.i[1], a.i[2], a.i[3], a.i[4],
                           a.i[5], a.i[6], a.i[7], a.i[8], a.i[9], a.i[10], a.f[0], a.f[1], a.f[2], a.f[3], a.f[4], a.f[5]);
}
