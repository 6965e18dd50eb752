// What the files of one instruction set share.
#pragma once

#include "eaas/native/ops.h"

namespace EAAS_ISA_NS {
void attend(const eaas::Attend* group);
}
