#include "standin.h"

typedef struct { pthread_mutex_t lock; pthread_cond_t changed; uint64_t recorded, done; unsigned flags; } Event;

typedef enum { COPY, SET, RECORD, WAIT, DELAY, HOST, KERNEL } Kind;

typedef struct Op {
    Kind kind;
    void *to;
    const void *from;
    size_t size; /* DELAY: nanoseconds */
    uint64_t number;
    void (*host)(void *);
    void (*kernel)(const void *, const unsigned *, const unsigned *);
    unsigned grid[3], block[3];
    Nanoseconds pushed_ns;
    struct Op *next;
} Op;

typedef struct Ops { Op *first, **last; } Ops;

typedef struct Stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Ops queue;
    Ops *capture;
    int capture_broken, running, stop, priority;
    uint64_t pushed, ended;
    Nanoseconds free_ns; /* manual clock: when the last work ended */
    pthread_t thread;
    struct Stream *next;
} Stream;

static Nanoseconds manual_ns;
static Stream *streams, *null_stream;

/* ---- streams ---- */
static void put(Ops *ops, Op *op) { op->next = NULL; *ops->last = op; ops->last = &op->next; }

static Op *get(Ops *ops)
{
    Op *op = ops->first;
    ops->first = op->next;
    if (!ops->first)
        ops->last = &ops->first;
    return op;
}

/* How long the next works of a kind take, in the order in which they begin; 0 when nothing was said. */
static struct { int64_t ns[64]; unsigned put, got; } durations[8];
static pthread_mutex_t durations_lock = PTHREAD_MUTEX_INITIALIZER;

/* A DELAY takes its duration when it becomes the first of its stream. */
static void latch(Op *op)
{
    if (op->kind != DELAY || !op->number)
        return;
    unsigned kind = op->number - 1;
    op->number = 0;
    pthread_mutex_lock(&durations_lock);
    if (durations[kind].got != durations[kind].put)
        op->size = (size_t)durations[kind].ns[durations[kind].got++ % 64];
    pthread_mutex_unlock(&durations_lock);
}

static void run(Op *op)
{
    Event *event = op->to;
    if (standin_is_broken())
        return; /* what is queued dies with the context */
    switch (op->kind) {
    case COPY: memmove(op->to, op->from, op->size); break;
    case SET: memset(op->to, (int)op->number, op->size); break;
    case RECORD:
        pthread_mutex_lock(&event->lock);
        if (op->number > event->done)
            event->done = op->number;
        pthread_cond_broadcast(&event->changed);
        pthread_mutex_unlock(&event->lock);
        break;
    case WAIT:
        pthread_mutex_lock(&event->lock);
        while (event->done < op->number)
            pthread_cond_wait(&event->changed, &event->lock);
        pthread_mutex_unlock(&event->lock);
        break;
    case DELAY:
        if (!standin_is_manual) {
            struct timespec left = {op->size / 1000000000, op->size % 1000000000};
            while (clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) == EINTR) {}
        }
        break;
    case HOST: op->host(op->to); break;
    case KERNEL: op->kernel(op->from, op->grid, op->block); free((void *)op->from); break;
    }
}

/* Ends the first op; called with the lock, which is free while it runs: a host function may want the GIL. */
static void run_first(Stream *s)
{
    Op *op = get(&s->queue);
    latch(op);
    s->running = 1;
    pthread_mutex_unlock(&s->lock);
    run(op);
    free(op);
    pthread_mutex_lock(&s->lock);
    s->running = 0;
    s->ended++;
    pthread_cond_broadcast(&s->changed);
}

static void *serve(void *argument)
{
    Stream *s = argument;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->queue.first && !s->stop)
            pthread_cond_wait(&s->changed, &s->lock);
        if (!s->queue.first)
            break;
        run_first(s);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* Manual clock: what is due, in order; `all`: everything, whatever the clock says. */
static void pump(Stream *s, int all)
{
    pthread_mutex_lock(&s->lock);
    while (s->queue.first && !s->running) {
        Op *op = s->queue.first;
        latch(op);
        Nanoseconds start = op->pushed_ns > s->free_ns ? op->pushed_ns : s->free_ns;
        Nanoseconds end = start + (op->kind == DELAY ? (Nanoseconds)op->size : 0);
        if (!all && end > __atomic_load_n(&manual_ns, __ATOMIC_ACQUIRE))
            break;
        s->free_ns = end;
        run_first(s);
    }
    pthread_mutex_unlock(&s->lock);
}

static Stream *make_stream(int priority)
{
    Stream *s = calloc(1, sizeof *s);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    s->queue.last = &s->queue.first;
    s->priority = priority;
    pthread_mutex_lock(&standin_lock);
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&standin_lock);
    if (!standin_is_manual)
        pthread_create(&s->thread, NULL, serve, s);
    return s;
}

static Stream *stream_of(void *handle)
{
    if ((uintptr_t)handle > 2)
        return handle;
    pthread_mutex_lock(&standin_lock);
    n_null++;
    Stream *s = null_stream;
    pthread_mutex_unlock(&standin_lock);
    return s ? s : (null_stream = make_stream(0));
}

static Result push(Stream *s, Op value)
{
    Op *op = malloc(sizeof *op);
    *op = value;
    pthread_mutex_lock(&s->lock);
    op->pushed_ns = manual_ns;
    if (s->capture)
        put(s->capture, op);
    else {
        put(&s->queue, op);
        s->pushed++;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    if (standin_is_manual)
        pump(s, 0);
    return OK;
}

static void drain(Stream *s)
{
    if (standin_is_manual)
        pump(s, 1);
    pthread_mutex_lock(&s->lock);
    uint64_t goal = s->pushed;
    while (s->ended < goal)
        pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

void drain_all(void)
{
    for (Stream *s = streams; s; s = s->next)
        drain(s);
}

/* ---- copies ---- */
static Result copy(Address to, Address from, size_t size, void *handle)
{
    return push(stream_of(handle), (Op){.kind = COPY, .to = (void *)to, .from = (void *)from, .size = size});
}
Result cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t size, void *stream)
{
    ENTER();
    if (!on_device(to, size) || !is_pinned(from))
        return INVALID_VALUE; /* stricter than CUDA, which stages or waits: never wanted here */
    return copy(to, (Address)from, size, stream);
}
Result cuMemcpyDtoHAsync_v2(void *to, Address from, size_t size, void *stream)
{
    ENTER();
    if (!on_device(from, size) || !is_pinned(to))
        return INVALID_VALUE;
    return copy((Address)to, from, size, stream);
}
Result cuMemcpyDtoH_v2(void *to, Address from, size_t size) { ENTER(); (void)to, (void)from, (void)size; stream_of(NULL); return INVALID_VALUE; }
Result cuMemcpyHtoD_v2(Address to, const void *from, size_t size) { ENTER(); (void)to, (void)from, (void)size; stream_of(NULL); return INVALID_VALUE; }
Result cuMemsetD8Async(Address to, unsigned char value, size_t size, void *stream)
{
    ENTER();
    if (!on_device(to, size))
        return INVALID_VALUE;
    return push(stream_of(stream), (Op){.kind = SET, .to = (void *)to, .size = size, .number = value});
}

/* ---- streams and events ---- */
Result cuStreamCreateWithPriority(void **stream, unsigned flags, int priority)
{
    ENTER();
    (void)flags;
    n_streams++;
    *stream = make_stream(priority);
    return OK;
}
Result cuStreamCreate(void **stream, unsigned flags) { ENTER(); (void)flags; n_streams++; *stream = make_stream(0); return OK; }
Result cuStreamGetPriority(void *stream, int *priority) { ENTER(); *priority = stream_of(stream)->priority; return OK; }
Result cuStreamDestroy_v2(void *handle)
{
    ENTER();
    Stream *s = handle;
    drain(s);
    pthread_mutex_lock(&standin_lock);
    for (Stream **p = &streams; *p; p = &(*p)->next)
        if (*p == s) {
            *p = s->next;
            break;
        }
    n_streams--;
    pthread_mutex_unlock(&standin_lock);
    if (!standin_is_manual) {
        pthread_mutex_lock(&s->lock);
        s->stop = 1;
        pthread_cond_broadcast(&s->changed);
        pthread_mutex_unlock(&s->lock);
        pthread_join(s->thread, NULL);
    }
    free(s);
    return OK;
}
/* Waits even when it answers with a sticky error: what a host function uses may be freed behind it. */
Result cuStreamSynchronize(void *stream) { drain(stream_of(stream)); return enter(__func__); }
Result cuStreamQuery(void *stream)
{
    ENTER();
    Stream *s = stream_of(stream);
    pthread_mutex_lock(&s->lock);
    Result result = s->ended < s->pushed ? NOT_READY : OK;
    pthread_mutex_unlock(&s->lock);
    return result;
}
Result cuStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    ENTER();
    (void)flags;
    return push(stream_of(stream), (Op){.kind = WAIT, .to = event, .number = ((Event *)event)->recorded});
}
Result cuLaunchHostFunc(void *stream, void (*host)(void *), void *data)
{
    ENTER();
    return push(stream_of(stream), (Op){.kind = HOST, .host = host, .to = data});
}
Result cuEventCreate(void **event, unsigned flags)
{
    ENTER();
    Event *e = calloc(1, sizeof *e);
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->changed, NULL);
    e->flags = flags;
    n_events++;
    *event = e;
    return OK;
}
Result cuEventDestroy_v2(void *event) { ENTER(); n_events--; free(event); return OK; }
Result cuEventRecord(void *event, void *stream)
{
    ENTER();
    Event *e = event;
    pthread_mutex_lock(&e->lock);
    uint64_t number = ++e->recorded;
    pthread_mutex_unlock(&e->lock);
    __atomic_add_fetch(&n_records, 1, __ATOMIC_RELEASE);
    return push(stream_of(stream), (Op){.kind = RECORD, .to = e, .number = number});
}
Result cuEventQuery(void *event)
{
    ENTER();
    Event *e = event;
    pthread_mutex_lock(&e->lock);
    Result result = e->done < e->recorded ? NOT_READY : OK;
    n_queries++;
    pthread_mutex_unlock(&e->lock);
    return result;
}
/* ---- graphs: what a stream would have queued, kept and queued again ---- */
Result cuStreamBeginCapture_v2(void *stream, int mode)
{
    ENTER();
    (void)mode;
    Stream *s = stream_of(stream);
    if (s->capture)
        return INVALID_VALUE;
    s->capture = calloc(1, sizeof(Ops));
    s->capture->last = &s->capture->first;
    s->capture_broken = 0;
    n_graphs++;
    return OK;
}
Result cuStreamEndCapture(void *stream, void **graph)
{
    ENTER();
    Stream *s = stream_of(stream);
    if (!s->capture)
        return INVALID_VALUE;
    *graph = s->capture_broken ? NULL : s->capture;
    if (s->capture_broken) {
        free(s->capture);
        n_graphs--;
    }
    s->capture = NULL;
    return s->capture_broken ? CAPTURE_INVALIDATED : OK;
}
static Op *copy_of(const Op *op)
{
    Op *c = malloc(sizeof *c);
    *c = *op;
    return c;
}
Result cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags)
{
    ENTER();
    (void)flags;
    Ops *ops = calloc(1, sizeof *ops);
    ops->last = &ops->first;
    for (Op *op = ((Ops *)graph)->first; op; op = op->next)
        put(ops, copy_of(op));
    n_graphs++;
    *executable = ops;
    return OK;
}
static Result destroy_graph(Ops *ops)
{
    while (ops->first)
        free(get(ops));
    free(ops);
    n_graphs--;
    return OK;
}
Result cuGraphDestroy(void *graph) { ENTER(); return destroy_graph(graph); }
Result cuGraphExecDestroy(void *executable) { ENTER(); return destroy_graph(executable); }
Result cuGraphLaunch(void *executable, void *stream)
{
    ENTER();
    for (Op *op = ((Ops *)executable)->first; op; op = op->next)
        TRY(push(stream_of(stream), *op));
    return OK;
}
/* ---- kernels: a module is the path of a host library, kernel NAME its function standin_NAME(packed arguments, grid, block) ---- */
Result cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *options, void *values)
{
    ENTER();
    (void)count, (void)options, (void)values;
    *module = dlopen(image, RTLD_NOW | RTLD_LOCAL);
    n_modules += *module != NULL;
    return *module ? OK : INVALID_IMAGE;
}
Result cuModuleLoadData(void **module, const void *image) { return cuModuleLoadDataEx(module, image, 0, NULL, NULL); }
Result cuModuleUnload(void *module) { ENTER(); n_modules--; return dlclose(module) ? INVALID_HANDLE : OK; }
Result cuModuleGetFunction(void **function, void *module, const char *name)
{
    ENTER();
    char host_name[128];
    snprintf(host_name, sizeof host_name, "standin_%s", name);
    *function = dlsym(module, host_name);
    return *function ? OK : NOT_FOUND;
}
Result cuFuncSetBlockShape(void *f, int x, int y, int z) { ENTER(); (void)f, (void)x, (void)y, (void)z; return OK; }
Result cuFuncSetSharedSize(void *f, unsigned size) { ENTER(); (void)f, (void)size; return OK; }
Result cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *stream, void **params, void **extra)
{
    ENTER();
    (void)shared;
    void *buffer = NULL;
    size_t size = 0;
    for (; extra && *extra; extra += 2) {
        if (*extra == (void *)1)
            buffer = extra[1];
        else if (*extra == (void *)2)
            size = *(size_t *)extra[1];
    }
    if (params || !buffer)
        return INVALID_VALUE;
    void *packed = malloc(size);
    memcpy(packed, buffer, size);
    return push(stream_of(stream), (Op){.kind = KERNEL, .from = packed, .grid = {gx, gy, gz}, .block = {bx, by, bz},
                                        .kernel = (void (*)(const void *, const unsigned *, const unsigned *))function});
}
/* ---- for tests ---- */
/* Work of kind 0 to 7, which takes as long as the next standin_duration() of that kind says. */
Result standin_delay(void *stream, unsigned kind) { return push(stream_of(stream), (Op){.kind = DELAY, .number = kind + 1}); }
void standin_duration(unsigned kind, int64_t ns)
{
    pthread_mutex_lock(&durations_lock);
    durations[kind].ns[durations[kind].put++ % 64] = ns;
    pthread_mutex_unlock(&durations_lock);
}
void standin_forget_durations(void) { memset(durations, 0, sizeof durations); }
void standin_break_capture(void *stream) { if (stream_of(stream)->capture) stream_of(stream)->capture_broken = 1; }
int standin_capturing(void *stream) { return stream_of(stream)->capture != NULL; }
void standin_manual(int on) { standin_is_manual = on; }
int64_t standin_now(void) { return manual_ns; }
/* The next instant at which work ends, -1: none is queued. */
int64_t standin_next(void)
{
    Nanoseconds next = -1;
    pthread_mutex_lock(&standin_lock);
    for (Stream *s = streams; s; s = s->next) {
        pthread_mutex_lock(&s->lock);
        Op *op = s->queue.first;
        if (op) {
            latch(op);
            Nanoseconds end = op->pushed_ns > s->free_ns ? op->pushed_ns : s->free_ns;
            end += op->kind == DELAY ? (Nanoseconds)op->size : 0;
            next = next < 0 || end < next ? end : next;
        }
        pthread_mutex_unlock(&s->lock);
    }
    pthread_mutex_unlock(&standin_lock);
    return next;
}
void standin_advance(int64_t now_ns)
{
    __atomic_store_n(&manual_ns, now_ns, __ATOMIC_RELEASE);
    for (Stream *s = streams; s; s = s->next)
        pump(s, 0);
}
