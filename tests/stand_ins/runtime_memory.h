/* Registration, device memory, devices, errors. Part of runtime.c. */

static uint8_t *page_start(const Registration *r) { return (uint8_t *)((uintptr_t)r->host / page * page); }

static size_t page_span(const Registration *r)
{
    return ((uintptr_t)r->host + r->nbytes + page - 1) / page * page - (uintptr_t)page_start(r);
}

/* A place for an alias, by turns from the low and from the high end, so that neighbours lie apart either way. */
static uint8_t *place(int device, size_t span)
{
    size_t gap = (1 + draw(64)) * page;
    if (calls.registers % 2)
        return (arena_low[device] += gap + span) - span;
    return arena_high[device] -= gap + span;
}

static int map_twice(Registration *r)
{
    uint8_t *first = page_start(r);
    size_t span = page_span(r);
    int file = memfd_create("registered", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)span))
        return OUT_OF_MEMORY;
    uint8_t *shared = mmap(NULL, span, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED)
        return close(file), OUT_OF_MEMORY;
    memcpy(shared, first, span);
    for (int device = 0; device < DEVICES; device++) {
        uint8_t *at = place(device, span);
        if (mmap(at, span, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != at)
            abort();
        r->alias[device] = at + (r->host - first);
    }
    close(file);
    if (mremap(shared, span, span, MREMAP_MAYMOVE | MREMAP_FIXED, first) != first)
        abort();
    madvise(first, span, MADV_DONTFORK);
    return SUCCESS;
}

static void map_once(Registration *r)
{
    uint8_t *first = page_start(r);
    size_t span = page_span(r);
    for (int device = 0; device < DEVICES; device++)
        mmap(r->alias[device] - (r->host - first), span, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    uint8_t *own = mmap(NULL, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (own == MAP_FAILED)
        abort();
    memcpy(own, first, span);
    if (mremap(own, span, span, MREMAP_MAYMOVE | MREMAP_FIXED, first) != first)
        abort();
    madvise(first, span, MADV_DONTFORK);
}

API(HostRegister)(void *host, size_t nbytes, unsigned flags)
{
    ENTER();
    calls.registers++;
    if (any_capture()) {
        spoiled = 1;
        return leave(CAPTURE_UNSUPPORTED);
    }
    if (!host || !nbytes || flags & ~0xfu)
        return leave(INVALID_VALUE);
    if (calls.registers == register_fails_at || nbytes > register_fails_above)
        return leave(injected_error);
    Registration *slot = NULL, fresh = {host, {0}, nbytes, flags, current_device};
    for (int i = 0; i < MOST; i++) {
        Registration *r = &registrations[i];
        if (r->host && touches(page_start(&fresh), page_span(&fresh), page_start(r), page_span(r)))
            return leave(ALREADY_REGISTERED);
        if (!r->host && !slot)
            slot = r;
    }
    if (!slot)
        return leave(OUT_OF_MEMORY);
    for (int device = 0; device < DEVICES; device++)
        fresh.alias[device] = host;
    int rc = distinct ? map_twice(&fresh) : SUCCESS;
    if (!rc)
        *slot = fresh;
    return leave(rc);
}

static int in_use(const Stream *stream, const Registration *r)
{
    for (Work *work = stream->first; work; work = work->next) {
        uint8_t *starts[] = {r->host, r->alias[0], r->alias[1]};
        size_t rows = work->height ? work->height - 1 : 0;
        for (int i = 0; i < 3 && work->kind == COPY; i++)
            if (touches(work->target, rows * work->target_pitch + work->width, starts[i], r->nbytes)
                || touches(work->source, rows * work->source_pitch + work->width, starts[i], r->nbytes))
                return 1;
    }
    return 0;
}

API(HostUnregister)(void *host)
{
    ENTER();
    calls.unregisters++;
    if (calls.unregisters == unregister_fails_at)
        return leave(injected_error);
    for (int i = 0; host && i < MOST; i++) {
        Registration *r = &registrations[i];
        if (r->host != host)
            continue;
        for (int s = 0; s < MOST; s++)
            calls.unregistered_in_use += (size_t)in_use(&streams[s], r);
        int rc = run_all();
        if (distinct)
            map_once(r);
        memset(r, 0, sizeof *r);
        return leave(rc);
    }
    return leave(INVALID_VALUE);
}

API(HostGetDevicePointer)(void **seen, void *host, unsigned flags)
{
    ENTER();
    calls.aliases++;
    for (int i = 0; seen && !flags && i < MOST; i++) {
        Registration *r = &registrations[i];
        if (r->host && inside(host, 1, r->host, r->nbytes)) {
            if (!(r->flags & MAPPED) || (r->device != current_device && !(r->flags & PORTABLE)))
                break;
            *seen = r->alias[current_device] + ((uint8_t *)host - r->host);
            return leave(SUCCESS);
        }
    }
    return leave(INVALID_VALUE);
}

API(Malloc)(void **start, size_t nbytes)
{
    ENTER();
    size_t span = (nbytes + page - 1) / page * page;
    for (int i = 0; start && nbytes && i < MOST; i++) {
        if (allocations[i].start)
            continue;
        uint8_t *guarded = mmap(NULL, span + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (guarded == MAP_FAILED || mprotect(guarded + page, span, PROT_READ | PROT_WRITE))
            return leave(OUT_OF_MEMORY);
        allocations[i] = (Allocation){.start = guarded + page, .nbytes = nbytes, .device = current_device};
        *start = guarded + page;
        return leave(SUCCESS);
    }
    return leave(start && nbytes ? OUT_OF_MEMORY : INVALID_VALUE);
}

API(Free)(void *start)
{
    ENTER();
    for (int i = 0; start && i < MOST; i++) {
        if (allocations[i].start != start)
            continue;
        int rc = run_all();
        munmap((uint8_t *)start - page, (allocations[i].nbytes + page - 1) / page * page + 2 * page);
        allocations[i].start = NULL;
        return leave(rc);
    }
    return leave(start ? INVALID_VALUE : SUCCESS);
}

/* The fields that both vendors' structures start with. */
typedef struct { int type, device; void *device_pointer, *host_pointer; } Attributes;

API(PointerGetAttributes)(Attributes *attributes, const void *pointer)
{
    ENTER();
    const uint8_t *at = pointer;
    *attributes = (Attributes){.device = -1};
    for (int i = 0; i < MOST; i++) {
        Allocation *a = &allocations[i];
        if (inside(at, 1, a->start, a->nbytes))
            *attributes = (Attributes){2, a->device, (void *)at, NULL};
        Registration *r = &registrations[i];
        for (int device = 0; r->host && device < DEVICES; device++) {
            int by_alias = inside(at, 1, r->alias[device], r->nbytes);
            if (!by_alias && !inside(at, 1, r->host, r->nbytes))
                continue;
            size_t offset = (size_t)(at - (by_alias ? r->alias[device] : r->host));
            *attributes = (Attributes){1, current_device, r->alias[current_device] + offset, r->host + offset};
        }
    }
    return leave(SUCCESS);
}

API(GetDeviceCount)(int *count) { return *count = DEVICES, SUCCESS; }

API(GetDevice)(int *device) { return *device = current_device, SUCCESS; }

API(SetDevice)(int device)
{
    ENTER();
    if (device < 0 || device >= DEVICES)
        return leave(INVALID_DEVICE);
    current_device = device;
    return leave(SUCCESS);
}

API(RuntimeGetVersion)(int *version) { return *version = VERSION, SUCCESS; }

API(PeekAtLastError)(void) { return poisoned ? poisoned : last_error; }

API(GetLastError)(void)
{
    int rc = poisoned ? poisoned : last_error;
    last_error = SUCCESS;
    return rc;
}

__attribute__((visibility("default"))) const char *JOIN(PREFIX, GetErrorName)(int rc)
{
    static const struct { int rc; const char *name; } names[] = {
        {SUCCESS, "Success"}, {INVALID_VALUE, "InvalidValue"}, {OUT_OF_MEMORY, "OutOfMemory"},
        {INVALID_PITCH, "InvalidPitchValue"}, {INVALID_DIRECTION, "InvalidMemcpyDirection"},
        {INVALID_DEVICE, "InvalidDevice"}, {INVALID_HANDLE, "InvalidResourceHandle"}, {NOT_READY, "NotReady"},
        {ILLEGAL_ADDRESS, "IllegalAddress"}, {ALREADY_REGISTERED, "HostMemoryAlreadyRegistered"},
        {CAPTURE_UNSUPPORTED, "StreamCaptureUnsupported"}, {CAPTURE_INVALIDATED, "StreamCaptureInvalidated"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].rc == rc)
            return names[i].name;
    return "Unknown";
}

/* For tests: a count by name, -1 for a name that there is none of. */
__attribute__((visibility("default"))) long long standInCount(const char *name)
{
    size_t live = 0, allocated = 0, queued = 0, by_default[DEVICES] = {0};
    pthread_mutex_lock(&lock);
    for (int device = 0; device < DEVICES; device++)
        for (Work *work = defaults[device].first; work; work = work->next)
            by_default[device]++;
    for (int i = 0; i < MOST; i++) {
        live += registrations[i].host != NULL;
        allocated += allocations[i].start != NULL;
        for (Work *work = streams[i].first; work; work = work->next)
            queued++;
    }
    const struct { const char *name; size_t count; } counts[] = {
        {"live_registrations", live}, {"live_mappings", distinct ? live * DEVICES : 0},
        {"live_allocations", allocated}, {"queued", queued}, {"queued_0", by_default[0]},
        {"queued_1", by_default[1]}, {"last_error", (size_t)last_error},
        {"register", calls.registers}, {"unregister", calls.unregisters}, {"alias", calls.aliases},
        {"copy", calls.copies}, {"copy_2d", calls.copies_2d}, {"batch", calls.batches},
        {"batch_3d", calls.batches_3d}, {"unregistered_in_use", calls.unregistered_in_use},
    };
    pthread_mutex_unlock(&lock);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (!strcmp(counts[i].name, name))
            return (long long)counts[i].count;
    return -1;
}
