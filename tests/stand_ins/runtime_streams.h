/* Streams, events, captures. Part of runtime.c. */

API(StreamCreateWithFlags)(void **handle, unsigned flags)
{
    ENTER();
    for (int i = 0; handle && flags <= 1 && i < MOST; i++)
        if (!streams[i].live) {
            streams[i] = (Stream){.live = 1, .device = current_device};
            *handle = &streams[i];
            return leave(SUCCESS);
        }
    return leave(INVALID_VALUE);
}

API(StreamDestroy)(void *handle)
{
    ENTER();
    Stream *stream = handle ? stream_of(handle) : NULL;
    if (!stream)
        return leave(INVALID_HANDLE);
    int rc = run_all();
    stream->live = 0;
    return leave(rc);
}

API(StreamSynchronize)(void *handle)
{
    ENTER();
    Stream *stream = stream_of(handle);
    if (!stream)
        return leave(INVALID_HANDLE);
    while (stream->first && step())
        ;
    return leave(poisoned);
}

API(DeviceSynchronize)(void)
{
    ENTER();
    return leave(any_capture() ? CAPTURE_UNSUPPORTED : run_all());
}

API(EventCreateWithFlags)(void **handle, unsigned flags)
{
    ENTER();
    for (int i = 0; handle && flags <= 7 && i < MOST; i++)
        if (!events[i].live) {
            events[i] = (Event){.live = 1, .device = current_device};
            *handle = &events[i];
            return leave(SUCCESS);
        }
    return leave(INVALID_VALUE);
}

API(EventDestroy)(void *handle)
{
    ENTER();
    Event *event = event_of(handle);
    if (!event)
        return leave(INVALID_HANDLE);
    forget(event->last);
    memset(event, 0, sizeof *event);
    return leave(SUCCESS);
}

/* An event is recorded in streams of its own device alone. */
API(EventRecord)(void *event_handle, void *stream_handle)
{
    ENTER();
    Event *event = event_of(event_handle);
    Stream *stream = stream_of(stream_handle);
    if (!event || !stream || event->device != stream->device)
        return leave(INVALID_HANDLE);
    if (stream->capturing)
        return leave(SUCCESS);
    forget(event->last);
    event->last = calloc(1, sizeof *event->last);
    event->last->references = 1;
    submit(stream, (Work){.kind = RECORD, .mark = event->last});
    return leave(SUCCESS);
}

/* A wait is for the event as it is now; one that nobody recorded is no wait. */
API(StreamWaitEvent)(void *stream_handle, void *event_handle, unsigned flags)
{
    ENTER();
    Event *event = event_of(event_handle);
    Stream *stream = stream_of(stream_handle);
    if (!event || !stream || flags > 1)
        return leave(INVALID_HANDLE);
    if (event->last && !stream->capturing)
        submit(stream, (Work){.kind = WAIT, .mark = event->last});
    return leave(SUCCESS);
}

API(EventQuery)(void *handle)
{
    ENTER();
    Event *event = event_of(handle);
    if (!event)
        return leave(INVALID_HANDLE);
    int done = !event->last || event->last->done;
    for (size_t left = 1 + draw(4); left && step(); left--)
        ;
    return leave(poisoned ? poisoned : done ? SUCCESS : NOT_READY);
}

API(EventSynchronize)(void *handle)
{
    ENTER();
    Event *event = event_of(handle);
    if (!event)
        return leave(INVALID_HANDLE);
    while (event->last && !event->last->done && step())
        ;
    return leave(poisoned);
}

API(StreamBeginCapture)(void *handle, int mode)
{
    ENTER();
    Stream *stream = handle ? stream_of(handle) : NULL;
    if (!stream || stream->capturing || mode < 0 || mode > 2)
        return leave(INVALID_VALUE);
    stream->capturing = 1;
    spoiled = 0;
    return leave(SUCCESS);
}

/* There are no graphs here: what was captured is dropped, and the graph is NULL. */
API(StreamEndCapture)(void *handle, void **graph)
{
    ENTER();
    Stream *stream = handle ? stream_of(handle) : NULL;
    if (!stream || !stream->capturing)
        return leave(INVALID_VALUE);
    stream->capturing = 0;
    *graph = NULL;
    return leave(spoiled ? CAPTURE_INVALIDATED : SUCCESS);
}

API(StreamIsCapturing)(void *handle, int *status)
{
    ENTER();
    Stream *stream = stream_of(handle);
    if (!stream)
        return leave(INVALID_HANDLE);
    *status = stream->capturing;
    return leave(SUCCESS);
}
