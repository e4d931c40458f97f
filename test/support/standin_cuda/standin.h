/* TEST CODE. A stand-in for the part of the CUDA driver that pycuda and cuda-bindings use here, on the host: it keeps the
 * order of calls, asynchrony, events, the current-context rule, bounds of copies, sticky errors and leaks. It has no GPU in
 * it and says NOTHING about timing or numbers of a real one.
 *
 * Device memory is host memory, filled with 0xFF (a NaN in every float) when allocated. Work on a stream is run
 *   - by one thread per stream, in real time, or
 *   - with a manual clock (standin_manual(1) before streams are made): by whoever pushes, queries or advances, and work that
 *     takes time is done when standin_advance() has moved the clock over its end. Synchronising ends everything at once.
 * Functions named standin_* are for tests. Kernels: see cuModuleLoadDataEx. */
#ifndef STANDIN_H
#define STANDIN_H
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int Result;
typedef uint64_t Address;
typedef int64_t Nanoseconds;

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
    CAPTURE_INVALIDATED = 901
};
#define TRY(call) do { Result result_ = (call); if (result_) return result_; } while (0)

/* What standin_device.c and standin_streams.c share; defined in the former. */
extern pthread_mutex_t standin_lock;
extern int standin_is_manual;
extern long n_streams, n_events, n_graphs, n_modules, n_null, n_queries, n_records;
Result enter(const char *name);
#define ENTER() TRY(enter(__func__))
int standin_is_broken(void);
int on_device(Address at, size_t size);
int is_pinned(const void *at);
void drain_all(void);

#endif
