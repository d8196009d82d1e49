/* Copies, and a kernel. Part of runtime.c. Descriptors are read at submission, bytes when the copy runs. */

static size_t copy_calls(void) { return calls.copies + calls.copies_2d + calls.batches + calls.batches_3d; }

static int injected(void) { return copy_fails_at && copy_calls() == copy_fails_at; }

static Work copy_of(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                    size_t height)
{
    return (Work){.kind = COPY, .target = target, .source = (uint8_t *)source, .target_pitch = target_pitch,
                  .source_pitch = source_pitch, .width = width, .height = height};
}

static int checked(const Work *copy, int batch)
{
    if (!copy->width || !copy->height)
        return batch ? INVALID_VALUE : SUCCESS;
    if (copy->height > 1 && (copy->width > copy->target_pitch || copy->width > copy->source_pitch))
        return INVALID_PITCH;
    size_t rows = copy->height - 1;
    return copy_reaches(copy->target, rows * copy->target_pitch + copy->width, batch)
                   && copy_reaches(copy->source, rows * copy->source_pitch + copy->width, batch)
               ? SUCCESS
               : INVALID_VALUE;
}

static int submit_one(Work copy, int direction, void *handle)
{
    Stream *stream = stream_of(handle);
    if (!stream)
        return INVALID_HANDLE;
    if (direction < 0 || direction > 4)
        return INVALID_DIRECTION;
    if (injected() && !fails_late)
        return injected_error;
    int rc = checked(&copy, 0);
    copy.fails = injected();
    if (!rc && !stream->capturing)
        submit(stream, copy);
    return rc;
}

API(MemcpyAsync)(void *target, const void *source, size_t nbytes, int direction, void *stream)
{
    ENTER();
    calls.copies++;
    return leave(submit_one(copy_of(target, nbytes, source, nbytes, nbytes, 1), direction, stream));
}

API(Memcpy2DAsync)(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                   size_t height, int direction, void *stream)
{
    ENTER();
    calls.copies_2d++;
    Work copy = copy_of(target, target_pitch, source, source_pitch, width, height);
    return leave(submit_one(copy, direction, stream));
}

#if defined(BATCH) || defined(BATCH_3D)
/* All or nothing; the copies of a batch run in an order of their own. Frees `copies`. */
static int submit_batch(Work *copies, size_t count, void *handle, size_t *bad)
{
    Stream *stream = stream_of(handle);
    int rc = !stream || !handle ? INVALID_VALUE : stream->capturing ? CAPTURE_UNSUPPORTED : SUCCESS;
    if (!rc && injected() && !fails_late)
        rc = injected_error;
    *bad = SIZE_MAX;
    for (size_t i = 0; !rc && i < count; i++) {
        rc = checked(&copies[i], 1);
        if (rc)
            *bad = i;
    }
    for (size_t left = count; !rc && left; left--) {
        size_t drawn = draw(left);
        Work copy = copies[drawn];
        copy.fails = injected() && left == count;
        copies[drawn] = copies[left - 1];
        submit(stream, copy);
    }
    free(copies);
    return rc;
}
#endif

#ifdef BATCH
typedef struct { int type, id; } Location;
typedef struct { int order; Location source, target; unsigned flags; } CopyAttributes;

API(MemcpyBatchAsync)(void **targets, void **sources, size_t *sizes, size_t count, CopyAttributes *attributes,
                      size_t *first_of_attribute, size_t attribute_count, FAIL_INDEX_ARGUMENT void *stream)
{
    ENTER();
    calls.batches++;
    if (!count || attribute_count != 1 || first_of_attribute[0] || attributes[0].order < 1
        || attributes[0].order > 3)
        return leave(INVALID_VALUE);
    size_t bad;
    Work *copies = calloc(count, sizeof *copies);
    for (size_t i = 0; i < count; i++)
        copies[i] = copy_of(targets[i], sizes[i], sources[i], sizes[i], sizes[i], 1);
    int rc = submit_batch(copies, count, stream, &bad);
    FAILED_AT(bad);
    return leave(rc);
}
#endif

#ifdef BATCH_3D
typedef struct {
    int type;
    union {
        struct { void *pointer; size_t row_length, layer_height; struct { int type, id; } location; } pointer;
        struct { void *array; size_t x, y, z; } array;
    } is;
} Operand;
typedef struct { Operand source, target; size_t width, height, depth; int order; unsigned flags; } Operation;

API(Memcpy3DBatchAsync)(size_t count, Operation *operations, FAIL_INDEX_ARGUMENT unsigned long long flags,
                        void *stream)
{
    ENTER();
    calls.batches_3d++;
    if (!count || flags)
        return leave(INVALID_VALUE);
    size_t bad;
    Work *copies = calloc(count, sizeof *copies);
    for (size_t i = 0; i < count; i++) {
        Operation *o = &operations[i];
        if (o->source.type != 1 || o->target.type != 1 || o->depth != 1 || o->order < 1 || o->order > 3)
            return free(copies), leave(INVALID_VALUE);
        copies[i] = copy_of(o->target.is.pointer.pointer, o->target.is.pointer.row_length,
                            o->source.is.pointer.pointer, o->source.is.pointer.row_length, o->width, o->height);
    }
    int rc = submit_batch(copies, count, stream, &bad);
    FAILED_AT(bad);
    return leave(rc);
}
#endif

/* For tests: a kernel of the stream's device that reads `count` rows through a table of addresses. */
__attribute__((visibility("default"))) int standInGather(void *target, void **table, size_t count, size_t nbytes,
                                                         void *handle)
{
    ENTER();
    Stream *stream = stream_of(handle);
    if (!stream)
        return leave(INVALID_HANDLE);
    uint8_t **own = calloc(count, sizeof *own);
    memcpy(own, table, count * sizeof *own);
    submit(stream, (Work){.kind = GATHER, .target = target, .width = nbytes, .height = count, .table = own});
    return leave(SUCCESS);
}
