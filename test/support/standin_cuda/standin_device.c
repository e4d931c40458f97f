#include "standin.h"

typedef struct { int pushes; } Context;

typedef struct Block {
    uintptr_t at;
    size_t size;
    int pinned;
    unsigned flags;
    struct Block *next;
} Block;

pthread_mutex_t standin_lock = PTHREAD_MUTEX_INITIALIZER;
int standin_is_manual;
long n_streams, n_events, n_graphs, n_modules, n_null, n_queries, n_records;
static Context primary;
static int initialized, retained, sticky, integrated, no_device;
static size_t capacity = (size_t)8 << 30, used;
static Block *blocks;
static long n_device, n_pinned, n_pushed, n_foreign, n_pageable, n_allocations;
static __thread Context *stack[16];
static __thread int depth;
static char fail_name[64];
static int fail_code, fail_after, fail_sticky;

/* First thing in every call that needs a context: errors asked for by a test, sticky errors, the current-context rule. */
Result enter(const char *name)
{
    Result result = OK;
    pthread_mutex_lock(&standin_lock);
    if (!initialized)
        result = NOT_INITIALIZED;
    else if (sticky)
        result = sticky;
    else if (depth == 0)
        result = INVALID_CONTEXT;
    else if (fail_name[0] && !strcmp(name, fail_name) && fail_after-- == 0) {
        result = fail_code;
        if (fail_sticky)
            sticky = fail_code;
        fail_name[0] = 0;
    }
    if (depth == 0)
        n_foreign++;
    pthread_mutex_unlock(&standin_lock);
    return result;
}
int standin_is_broken(void)
{
    pthread_mutex_lock(&standin_lock);
    int broken = sticky != 0;
    pthread_mutex_unlock(&standin_lock);
    return broken;
}

/* ---- memory ---- */
static Block *find(uintptr_t at, int pinned)
{
    for (Block *b = blocks; b; b = b->next)
        if (b->pinned == pinned && at >= b->at && at < b->at + b->size)
            return b;
    return NULL;
}

int on_device(Address at, size_t size)
{
    pthread_mutex_lock(&standin_lock);
    Block *b = find(at, 0);
    if (!b && (b = find(at, 1)) && !(b->flags & 2))
        b = NULL; /* pinned, but not mapped */
    int inside = b && at + size <= b->at + b->size;
    pthread_mutex_unlock(&standin_lock);
    return inside;
}

int is_pinned(const void *at)
{
    pthread_mutex_lock(&standin_lock);
    int found = find((uintptr_t)at, 1) != NULL;
    if (!found)
        n_pageable++;
    pthread_mutex_unlock(&standin_lock);
    return found;
}

static Result allocate(void **at, size_t size, int pinned, unsigned flags)
{
    if (!size)
        return INVALID_VALUE;
    pthread_mutex_lock(&standin_lock);
    void *memory = NULL;
    if (used + size > capacity || posix_memalign(&memory, 512, size)) {
        pthread_mutex_unlock(&standin_lock);
        return OUT_OF_MEMORY;
    }
    memset(memory, 0xFF, size);
    Block *b = malloc(sizeof *b);
    *b = (Block){(uintptr_t)memory, size, pinned, flags, blocks};
    blocks = b;
    used += size;
    n_allocations++;
    *(pinned ? &n_pinned : &n_device) += 1;
    *at = memory;
    pthread_mutex_unlock(&standin_lock);
    return OK;
}

static Result release(uintptr_t at, int pinned)
{
    Result result = INVALID_VALUE;
    pthread_mutex_lock(&standin_lock);
    for (Block **p = &blocks; *p; p = &(*p)->next)
        if ((*p)->at == at && (*p)->pinned == pinned) {
            Block *b = *p;
            *p = b->next;
            used -= b->size;
            *(pinned ? &n_pinned : &n_device) -= 1;
            free((void *)b->at);
            free(b);
            result = OK;
            break;
        }
    pthread_mutex_unlock(&standin_lock);
    return result;
}
/* ---- device and contexts ---- */
Result cuInit(unsigned flags)
{
    (void)flags;
    if (no_device)
        return NO_DEVICE;
    initialized = 1;
    return OK;
}
Result cuDriverGetVersion(int *version) { *version = 12090; return OK; }
Result cuDeviceGetCount(int *count) { *count = initialized; return initialized ? OK : NOT_INITIALIZED; }
Result cuDeviceGet(int *device, int index) { *device = 0; return !initialized ? NOT_INITIALIZED : index ? INVALID_DEVICE : OK; }
Result cuDeviceGetName(char *name, int size, int device) { (void)device; snprintf(name, size, "stand-in, no GPU"); return OK; }
Result cuDeviceTotalMem_v2(size_t *size, int device) { (void)device; *size = capacity; return OK; }
Result cuDeviceComputeCapability(int *major, int *minor, int device) { (void)device; *major = 8, *minor = 7; return OK; }
Result cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    switch (attribute) {
    case 18: *value = integrated; break;
    case 19: *value = 1; break; /* can map host memory */
    case 75: *value = 8; break;
    case 76: *value = 7; break;
    default: *value = 0;
    }
    return OK;
}
Result cuDevicePrimaryCtxRetain(void **context, int device)
{
    (void)device;
    pthread_mutex_lock(&standin_lock);
    retained++;
    pthread_mutex_unlock(&standin_lock);
    *context = &primary;
    return initialized ? OK : NOT_INITIALIZED;
}
Result cuDevicePrimaryCtxRelease_v2(int device)
{
    (void)device;
    pthread_mutex_lock(&standin_lock);
    Result result = retained > 0 ? OK : INVALID_CONTEXT;
    if (result == OK && --retained == 0)
        sticky = 0; /* the context is gone, and its error with it */
    n_pushed -= depth; /* pycuda pushes it for this call, and the thread ends with it */
    depth = 0;
    pthread_mutex_unlock(&standin_lock);
    return result;
}
Result cuCtxPushCurrent_v2(void *context)
{
    if (!context || depth == 16)
        return INVALID_CONTEXT;
    stack[depth++] = context;
    pthread_mutex_lock(&standin_lock);
    n_pushed++;
    pthread_mutex_unlock(&standin_lock);
    return OK;
}
Result cuCtxPopCurrent_v2(void **context)
{
    if (!depth)
        return INVALID_CONTEXT;
    depth--;
    if (context)
        *context = stack[depth];
    pthread_mutex_lock(&standin_lock);
    n_pushed--;
    pthread_mutex_unlock(&standin_lock);
    return OK;
}
Result cuCtxGetCurrent(void **context) { *context = depth ? stack[depth - 1] : NULL; return OK; }
Result cuCtxGetDevice(int *device) { ENTER(); *device = 0; return OK; }
Result cuCtxGetApiVersion(void *context, unsigned *version) { (void)context; *version = 3020; return OK; }
Result cuCtxGetStreamPriorityRange(int *least, int *greatest) { ENTER(); *least = 0; *greatest = -5; return OK; }
Result cuCtxSynchronize(void) { ENTER(); drain_all(); return OK; }

/* ---- memory ---- */
Result cuMemGetInfo_v2(size_t *left, size_t *total) { ENTER(); *total = capacity; *left = capacity - used; return OK; }
Result cuMemAlloc_v2(Address *at, size_t size)
{
    ENTER();
    void *memory;
    TRY(allocate(&memory, size, 0, 0));
    *at = (Address)memory;
    return OK;
}
Result cuMemFree_v2(Address at) { ENTER(); return release(at, 0); }
Result cuMemHostAlloc(void **at, size_t size, unsigned flags) { ENTER(); return allocate(at, size, 1, flags); }
Result cuMemAllocHost_v2(void **at, size_t size) { ENTER(); return allocate(at, size, 1, 0); }
Result cuMemFreeHost(void *at) { ENTER(); return release((uintptr_t)at, 1); }
Result cuMemHostGetDevicePointer_v2(Address *device, void *at, unsigned flags)
{
    ENTER();
    (void)flags;
    *device = (Address)at;
    return on_device((Address)at, 1) ? OK : INVALID_VALUE;
}

/* ---- errors ---- */
Result cuGetErrorName(Result code, const char **text)
{
    switch (code) {
    case OK: *text = "CUDA_SUCCESS"; break;
    case OUT_OF_MEMORY: *text = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case NO_DEVICE: *text = "CUDA_ERROR_NO_DEVICE"; break;
    case INVALID_CONTEXT: *text = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case 700: *text = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
    case 719: *text = "CUDA_ERROR_LAUNCH_FAILED"; break;
    default: *text = "CUDA_ERROR";
    }
    return OK;
}
Result cuGetErrorString(Result code, const char **text) { return cuGetErrorName(code, text); }

/* ---- symbols, for cuda-bindings ---- */
extern char __start_standin_defaults[], __stop_standin_defaults[];
Result cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
    static const char *suffixes[] = {"_v4", "_v3", "_v2", "WithFlags", ""};
    (void)version, (void)flags;
    Dl_info self;
    dladdr((void *)cuInit, &self);
    void *library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    *function = NULL;
    for (int i = 0; i < 5 && !*function; i++) {
        char name[128];
        snprintf(name, sizeof name, "%s%s", symbol, suffixes[i]);
        char *found = dlsym(library, name);
        if (found && (found < __start_standin_defaults || found >= __stop_standin_defaults))
            *function = found;
    }
    if (status)
        *status = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}
Result cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

/* ---- for tests ---- */
void standin_integrated(int on) { integrated = on; }
void standin_no_device(int on) { no_device = on; }
void standin_capacity(size_t size) { capacity = size; }
/* The call `after` calls of `name` from now answers `code`; sticky: and so does every later one, until the context is gone. */
void standin_fail(const char *name, int code, int after, int is_sticky)
{
    pthread_mutex_lock(&standin_lock);
    snprintf(fail_name, sizeof fail_name, "%s", name);
    fail_code = code, fail_after = after, fail_sticky = is_sticky;
    pthread_mutex_unlock(&standin_lock);
}
/* Whatever else this process did with the driver, TensorRT-RTX for one, is not counted. */
void standin_reset_counts(void) { n_foreign = n_null = n_pageable = 0; }
/* What is left; what was never wanted; what grows. */
void standin_counts(long *out)
{
    pthread_mutex_lock(&standin_lock);
    long values[] = {n_device, n_pinned, n_streams, n_events, n_graphs, n_modules, n_pushed, retained,
                     n_foreign, n_null, n_pageable, n_allocations, n_queries, n_records};
    memcpy(out, values, sizeof values);
    pthread_mutex_unlock(&standin_lock);
}
void standin_forgive(void)
{
    pthread_mutex_lock(&standin_lock);
    while (blocks) {
        Block *b = blocks;
        blocks = b->next;
        free(b);
    }
    used = 0;
    n_device = n_pinned = n_streams = n_events = n_graphs = n_modules = 0;
    pthread_mutex_unlock(&standin_lock);
}
