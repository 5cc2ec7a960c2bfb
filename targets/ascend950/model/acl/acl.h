// Stands where CANN's host header would: the model needs no host runtime.
#pragma once
typedef int aclError;
#define ACL_SUCCESS 0
#define ACL_RT_THREAD_LEVEL 0
inline aclError aclrtGetLastError(int) { return ACL_SUCCESS; }
