/* A stand-in for a vendor's GPU runtime library, for machines without a GPU. It is ours and no vendor's: it has
 * the calls that hicache binds, and holds them to what was measured of the real ones, or read of them.
 *
 *   cc -shared -fPIC -pthread -DPREFIX=cuda -DVERSION=13000 -DBATCH -DBATCH_3D [-DFAIL_INDEX] runtime.c
 *
 * PREFIX names the functions; VERSION is what RuntimeGetVersion says; BATCH and BATCH_3D say which batch copies
 * are exported, FAIL_INDEX that they have the argument failIdx.
 *
 * Devices are memory of this process: an address of "device" memory can be read, and a copy is a memcpy that waits
 * in a stream until somebody synchronises, queries, or (by the seed) submits something. With distinct aliases,
 * registered pages are moved into a file in memory that is mapped twice: where they were, and at the alias.
 *
 * Read from the environment when the library is loaded (all optional):
 *   STAND_IN_ALIAS                 equal (default) or distinct
 *   STAND_IN_SEED                  order of streams and distances of aliases; 0: nothing runs before it must
 *   STAND_IN_BATCH_REFUSES_HOST    1: batch copies want the alias of registered memory
 *   STAND_IN_REGISTER_FAILS_AT, STAND_IN_REGISTER_FAILS_ABOVE, STAND_IN_UNREGISTER_FAILS_AT
 *   STAND_IN_COPY_FAILS_AT         the k-th copy call, from 1, of any kind
 *   STAND_IN_COPY_FAILS_LATE       1: that copy is accepted and fails when it runs; every later call fails then
 *   STAND_IN_ERROR                 the code of injected failures (default 2)
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define API(name) __attribute__((visibility("default"))) int JOIN(PREFIX, name)
#ifdef FAIL_INDEX
#define FAIL_INDEX_ARGUMENT size_t *failed_at,
#define FAILED_AT(index) (*failed_at = (index))
#else
#define FAIL_INDEX_ARGUMENT
#define FAILED_AT(index) ((void)(index))
#endif

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_PITCH = 12, INVALID_DIRECTION = 21,
    INVALID_DEVICE = 101, INVALID_HANDLE = 400, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
};
enum { PORTABLE = 1, MAPPED = 2 };
enum { DEVICES = 2, MOST = 1024 };
static const size_t ARENA_BYTES = (size_t)4 << 30;

typedef struct { int done, references; } Mark;
typedef struct { int live, device; Mark *last; } Event;
typedef struct Work {
    enum { COPY, RECORD, WAIT, GATHER } kind;
    uint8_t *target, *source;
    size_t target_pitch, source_pitch, width, height;
    int fails;
    uint8_t **table;
    Mark *mark;
    struct Work *next;
} Work;
typedef struct { int live, device, capturing; Work *first, *last; } Stream;
typedef struct { uint8_t *start; size_t nbytes; int device; } Allocation;
typedef struct { uint8_t *host, *alias[DEVICES]; size_t nbytes; unsigned flags; int device; } Registration;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int last_error, current_device;
static int poisoned, spoiled, distinct, batch_refuses_host, fails_late, injected_error;
static size_t register_fails_at, register_fails_above, unregister_fails_at, copy_fails_at, page;
static uint64_t seed, state;
static Stream defaults[DEVICES], streams[MOST];
static Event events[MOST];
static Allocation allocations[MOST];
static Registration registrations[MOST];
static uint8_t *arena[DEVICES], *arena_low[DEVICES], *arena_high[DEVICES];
static struct {
    size_t registers, unregisters, aliases, copies, copies_2d, batches, batches_3d, unregistered_in_use;
} calls;

static size_t setting(const char *name, size_t otherwise)
{
    const char *value = getenv(name);
    return value && *value ? strtoull(value, NULL, 0) : otherwise;
}

__attribute__((constructor)) static void configure(void)
{
    const char *alias = getenv("STAND_IN_ALIAS");
    distinct = alias && !strcmp(alias, "distinct");
    seed = setting("STAND_IN_SEED", 0);
    state = seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du;
    batch_refuses_host = setting("STAND_IN_BATCH_REFUSES_HOST", 0) != 0;
    fails_late = setting("STAND_IN_COPY_FAILS_LATE", 0) != 0;
    injected_error = (int)setting("STAND_IN_ERROR", OUT_OF_MEMORY);
    register_fails_at = setting("STAND_IN_REGISTER_FAILS_AT", 0);
    register_fails_above = setting("STAND_IN_REGISTER_FAILS_ABOVE", SIZE_MAX);
    unregister_fails_at = setting("STAND_IN_UNREGISTER_FAILS_AT", 0);
    copy_fails_at = setting("STAND_IN_COPY_FAILS_AT", 0);
    page = (size_t)sysconf(_SC_PAGESIZE);
    for (int device = 0; device < DEVICES; device++) {
        defaults[device] = (Stream){.live = 1, .device = device};
        arena[device] = mmap(NULL, ARENA_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        arena_low[device] = arena[device];
        arena_high[device] = arena[device] + ARENA_BYTES;
    }
}

static size_t draw(size_t below)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (size_t)(state % below);
}

static int leave(int rc)
{
    if (rc)
        last_error = rc;
    pthread_mutex_unlock(&lock);
    return rc;
}

#define ENTER()                       \
    do {                              \
        pthread_mutex_lock(&lock);    \
        if (poisoned)                 \
            return leave(poisoned);   \
    } while (0)

/* --- who sees an address --- */

static int inside(const uint8_t *at, size_t span, const uint8_t *start, size_t nbytes)
{
    return start && at >= start && at + span <= start + nbytes;
}

static int touches(const uint8_t *at, size_t span, const uint8_t *start, size_t nbytes)
{
    return start && nbytes && at < start + nbytes && start < at + span;
}

/* A run of a copy lies in one allocation, one registration, one alias, or in memory that nobody registered. */
static int copy_reaches(const uint8_t *at, size_t span, int batch)
{
    for (int i = 0; i < MOST; i++)
        if (touches(at, span, allocations[i].start, allocations[i].nbytes))
            return inside(at, span, allocations[i].start, allocations[i].nbytes);
    for (int i = 0; i < MOST; i++) {
        Registration *r = &registrations[i];
        if (!r->host)
            continue;
        for (int device = 0; device < DEVICES; device++)
            if (touches(at, span, r->alias[device], r->nbytes))
                return inside(at, span, r->alias[device], r->nbytes);
        if (touches(at, span, r->host, r->nbytes))
            return inside(at, span, r->host, r->nbytes) && !(batch && batch_refuses_host);
    }
    for (int device = 0; device < DEVICES; device++)
        if (touches(at, span, arena[device], ARENA_BYTES))
            return 0;
    return at != NULL;
}

static int kernel_sees(const uint8_t *at, size_t span, int device)
{
    for (int i = 0; i < MOST; i++)
        if (allocations[i].device == device && inside(at, span, allocations[i].start, allocations[i].nbytes))
            return 1;
    for (int i = 0; i < MOST; i++)
        if (registrations[i].host && inside(at, span, registrations[i].alias[device], registrations[i].nbytes))
            return 1;
    return 0;
}

/* --- streams: what is submitted waits there --- */

static void forget(Mark *mark)
{
    if (mark && !--mark->references)
        free(mark);
}

static void perform(Stream *stream, Work *work)
{
    if (work->kind == RECORD)
        work->mark->done = 1;
    if (work->kind == COPY && work->fails)
        poisoned = injected_error;
    else if (work->kind == COPY)
        for (size_t row = 0; row < work->height; row++)
            memcpy(work->target + row * work->target_pitch, work->source + row * work->source_pitch,
                   work->width);
    for (size_t i = 0; work->kind == GATHER && i < work->height; i++) {
        uint8_t *to = work->target + i * work->width;
        if (!kernel_sees(work->table[i], work->width, stream->device)
            || !kernel_sees(to, work->width, stream->device)) {
            poisoned = ILLEGAL_ADDRESS;
            break;
        }
        memcpy(to, work->table[i], work->width);
    }
}

static int ready(const Stream *stream)
{
    Work *work = stream->first;
    return work && !(work->kind == WAIT && !work->mark->done);
}

/* Run the first piece of a stream drawn among those that can go on; 0 where none can. */
static int step(void)
{
    Stream *able[DEVICES + MOST];
    size_t count = 0;
    for (int i = 0; i < DEVICES; i++)
        if (ready(&defaults[i]))
            able[count++] = &defaults[i];
    for (int i = 0; i < MOST; i++)
        if (ready(&streams[i]))
            able[count++] = &streams[i];
    if (!count || poisoned)
        return 0;
    Stream *stream = able[draw(count)];
    Work *work = stream->first;
    stream->first = work->next;
    perform(stream, work);
    forget(work->mark);
    free(work->table);
    free(work);
    return 1;
}

static int run_all(void)
{
    while (step())
        ;
    return poisoned;
}

static void submit(Stream *stream, Work work)
{
    if (work.mark)
        work.mark->references++;
    Work *kept = malloc(sizeof *kept);
    *kept = work;
    kept->next = NULL;
    if (stream->first)
        stream->last->next = kept;
    else
        stream->first = kept;
    stream->last = kept;
    if (seed && !draw(3))
        step();
}

static Stream *stream_of(void *handle)
{
    if (!handle)
        return &defaults[current_device];
    for (int i = 0; i < MOST; i++)
        if (handle == &streams[i] && streams[i].live)
            return &streams[i];
    return NULL;
}

static Event *event_of(void *handle)
{
    for (int i = 0; i < MOST; i++)
        if (handle == &events[i] && events[i].live)
            return &events[i];
    return NULL;
}

static int any_capture(void)
{
    for (int i = 0; i < MOST; i++)
        if (streams[i].live && streams[i].capturing)
            return 1;
    return 0;
}

#include "runtime_memory.h"
#include "runtime_streams.h"
#include "runtime_copies.h"
