/* Compiled, never linked, against the CUDA 13 header of an installed package: what the binding takes for granted. */
#include <cuda_runtime_api.h>
#include <stddef.h>

#define SAME(what, value) _Static_assert((what) == (value), #what)

typedef struct cudaMemcpyAttributes Attributes;
typedef struct cudaMemcpy3DOperand Operand;
typedef struct cudaMemcpy3DBatchOp Operation;

SAME(cudaErrorNotReady, 600);
SAME(cudaErrorHostMemoryAlreadyRegistered, 712);
SAME(cudaErrorStreamCaptureUnsupported, 900);
SAME(cudaMemcpyDefault, 4);
SAME(cudaHostRegisterPortable | cudaHostRegisterMapped, 3);
SAME(cudaEventDisableTiming, 2);
SAME(cudaMemcpySrcAccessOrderStream, 1);
SAME(cudaMemcpyOperandTypePointer, 1);
SAME(sizeof(Attributes), ATTRIBUTES_SIZE);
SAME(offsetof(Attributes, srcAccessOrder), ATTRIBUTES_ORDER);
SAME(offsetof(Attributes, srcLocHint), ATTRIBUTES_SOURCE);
SAME(offsetof(Attributes, dstLocHint), ATTRIBUTES_TARGET);
SAME(offsetof(Attributes, flags), ATTRIBUTES_FLAGS);
SAME(sizeof(Operand), OPERAND_SIZE);
SAME(offsetof(Operand, type), OPERAND_TYPE);
SAME(offsetof(Operand, op.ptr.ptr), OPERAND_POINTER);
SAME(offsetof(Operand, op.ptr.rowLength), OPERAND_ROW_LENGTH);
SAME(offsetof(Operand, op.ptr.layerHeight), OPERAND_LAYER_HEIGHT);
SAME(offsetof(Operand, op.ptr.locHint), OPERAND_LOCATION);
SAME(sizeof(Operation), OPERATION_SIZE);
SAME(offsetof(Operation, src), OPERATION_SOURCE);
SAME(offsetof(Operation, dst), OPERATION_TARGET);
SAME(offsetof(Operation, extent.width), OPERATION_WIDTH);
SAME(offsetof(Operation, extent.height), OPERATION_HEIGHT);
SAME(offsetof(Operation, extent.depth), OPERATION_DEPTH);
SAME(offsetof(Operation, srcAccessOrder), OPERATION_ORDER);
SAME(offsetof(Operation, flags), OPERATION_FLAGS);

typedef cudaError_t E;
typedef enum cudaMemcpyKind Kind;
E (*const host_register)(void *, size_t, unsigned) = cudaHostRegister;
E (*const host_unregister)(void *) = cudaHostUnregister;
E (*const host_alias)(void **, void *, unsigned) = cudaHostGetDevicePointer;
E (*const copy)(void *, const void *, size_t, Kind, cudaStream_t) = cudaMemcpyAsync;
E (*const copy_2d)(void *, size_t, const void *, size_t, size_t, size_t, Kind, cudaStream_t) = cudaMemcpy2DAsync;
E (*const copy_batch)(void *const *, const void *const *, const size_t *, size_t, Attributes *, size_t *, size_t,
                      cudaStream_t) = cudaMemcpyBatchAsync;
E (*const copy_3d_batch)(size_t, Operation *, unsigned long long, cudaStream_t) = cudaMemcpy3DBatchAsync;
E (*const event_create)(cudaEvent_t *, unsigned) = cudaEventCreateWithFlags;
E (*const event_query)(cudaEvent_t) = cudaEventQuery;
E (*const event_synchronize)(cudaEvent_t) = cudaEventSynchronize;
E (*const event_record)(cudaEvent_t, cudaStream_t) = cudaEventRecord;
E (*const stream_wait)(cudaStream_t, cudaEvent_t, unsigned) = cudaStreamWaitEvent;
E (*const version)(int *) = cudaRuntimeGetVersion;
E (*const last_error)(void) = cudaGetLastError;
const char *(*const error_name)(cudaError_t) = cudaGetErrorName;
