/* Compiled, never linked, against the HIP header of an installed package: what the binding takes for granted. */
#define __HIP_PLATFORM_AMD__
#include <hip/hip_runtime_api.h>
#include <stddef.h>

#define SAME(what, value) _Static_assert((what) == (value), #what)

SAME(hipErrorNotReady, 600);
SAME(hipErrorHostMemoryAlreadyRegistered, 712);
SAME(hipErrorStreamCaptureUnsupported, 900);
SAME(hipMemcpyDefault, 4);
SAME(hipHostRegisterPortable | hipHostRegisterMapped, 3);
SAME(hipEventDisableTiming, 2);
SAME(hipMemcpySrcAccessOrderStream, 1);
SAME(sizeof(hipMemcpyAttributes), ATTRIBUTES_SIZE);
SAME(offsetof(hipMemcpyAttributes, srcAccessOrder), ATTRIBUTES_ORDER);
SAME(offsetof(hipMemcpyAttributes, srcLocHint), ATTRIBUTES_SOURCE);
SAME(offsetof(hipMemcpyAttributes, dstLocHint), ATTRIBUTES_TARGET);
SAME(offsetof(hipMemcpyAttributes, flags), ATTRIBUTES_FLAGS);

typedef hipError_t E;
E (*const host_register)(void *, size_t, unsigned) = hipHostRegister;
E (*const host_unregister)(void *) = hipHostUnregister;
E (*const host_alias)(void **, void *, unsigned) = hipHostGetDevicePointer;
E (*const copy)(void *, const void *, size_t, hipMemcpyKind, hipStream_t) = hipMemcpyAsync;
E (*const copy_2d)(void *, size_t, const void *, size_t, size_t, size_t, hipMemcpyKind, hipStream_t) = hipMemcpy2DAsync;
E (*const copy_batch)(void **, void **, size_t *, size_t, hipMemcpyAttributes *, size_t *, size_t, size_t *,
                      hipStream_t) = hipMemcpyBatchAsync;
E (*const event_create)(hipEvent_t *, unsigned) = hipEventCreateWithFlags;
E (*const event_query)(hipEvent_t) = hipEventQuery;
E (*const event_synchronize)(hipEvent_t) = hipEventSynchronize;
E (*const event_record)(hipEvent_t, hipStream_t) = hipEventRecord;
E (*const stream_wait)(hipStream_t, hipEvent_t, unsigned) = hipStreamWaitEvent;
E (*const version)(int *) = hipRuntimeGetVersion;
E (*const last_error)(void) = hipGetLastError;
const char *(*const error_name)(hipError_t) = hipGetErrorName;
