//! Compares every CUDA device with the processor: the frames are the same, and values come back both ways.

use std::sync::Arc;

use s4_engine::cuda::testing::{CodedTensor, Copies};
use s4weights::cuda::{Cuda, CudaEngine, CudaOptions, DeviceInfo};
use s4weights::{CpuEngine, DType, Preset, Simd};

use super::case::{Case, Fault, cases, damage, differs};
use super::{library, steps};
use crate::error::{Failure, Result};

const PRESETS: [Preset; 3] = [Preset::Fast, Preset::Balanced, Preset::Small];

/// Every fault, without those that need nvCOMP if it is missing.
fn faults(library: bool) -> &'static [Fault] {
    let all = &[Fault::Frame, Fault::Values, Fault::LibraryFrame, Fault::LibraryValues];
    if library { all } else { &all[..2] }
}

/// Runs everything on every device; returns a summary, or fails with the first difference. With
/// `fault` it fails if each fault was noticed, and returns a message if one was not.
pub(super) fn run(fault: bool, simd: Option<Simd>) -> Result<String> {
    let cuda =
        Cuda::discover().map_err(|e| Failure::Unsupported(format!("a GPU is required: {e}")))?;
    let simd = simd.unwrap_or_else(Simd::detect);
    if fault {
        return inject(&cuda, simd);
    }
    let mut said = vec![];
    for device in cuda.devices() {
        said.push(test_device(&cuda, device, simd, None)?);
    }
    Ok(said.join("\n"))
}

fn inject(cuda: &Cuda, simd: Simd) -> Result<String> {
    let mut noticed = vec![];
    for device in cuda.devices() {
        for &fault in faults(library::is_here()) {
            match test_device(cuda, device, simd, Some(fault)) {
                Err(Failure::Test(what)) => noticed.push(what),
                Err(e) => return Err(e),
                Ok(_) => {
                    return Ok(format!(
                        "an injected fault was not detected: {fault:?}, {}",
                        device.name
                    ));
                }
            }
        }
    }
    Err(Failure::Test(format!("every injected fault was detected: {}", noticed.join("; "))))
}

fn test_device(
    cuda: &Cuda,
    device: &DeviceInfo,
    simd: Simd,
    fault: Option<Fault>,
) -> Result<String> {
    let options = CudaOptions { simd, ..CudaOptions::default() };
    let engine = Arc::new(CudaEngine::new(cuda.clone(), options));
    let both = Both { engine, cpu: CpuEngine::new(simd), ordinal: device.ordinal };
    if matches!(fault, Some(Fault::LibraryFrame | Fault::LibraryValues)) {
        return library::compare(&both.engine, device, simd, fault);
    }
    let mut count = 0;
    for preset in PRESETS {
        for &dtype in DType::ALL {
            let cases = cases(dtype, preset);
            both.compare(preset, &cases, fault)?;
            count += cases.len();
        }
    }
    let steps = steps::compare(&both.engine, device.ordinal, simd)?;
    let chunks = both.engine.chunks();
    if chunks.refused > 0 || chunks.device == 0 {
        return Err(Failure::Test(format!(
            "{}: the device refused chunks, or got none: {chunks:?}",
            device.name
        )));
    }
    let library = library::compare(&both.engine, device, simd, None)?;
    Ok(format!(
        "selftest passed on {} (device {}): {count} tensors of {} dtypes, encoded and decoded by both \
         the device and the CPU; {steps} tensors of an optimizer's step; {} chunks on the device, {} on \
         the CPU (codecs that devices lack)\n{library}",
        device.name,
        device.ordinal,
        DType::ALL.len(),
        chunks.device,
        chunks.host
    ))
}

/// A device and the processor.
struct Both {
    engine: Arc<CudaEngine>,
    cpu: CpuEngine,
    ordinal: u32,
}

impl Both {
    /// Sends tensors through both. The device gets all tensors in one call, so that chunks of many tensors share
    /// its launches.
    fn compare(&self, preset: Preset, cases: &[Case], fault: Option<Fault>) -> Result<()> {
        let views: Vec<_> = cases.iter().map(Case::view).collect();
        let failed = |e: &dyn std::fmt::Display| {
            let first = cases.first().map_or("", |c| c.name.as_str());
            Failure::Test(format!("device {}, batch starting at `{first}`: {e}", self.ordinal))
        };
        let copies = Copies::new(&self.engine, self.ordinal).map_err(|e| failed(&e))?;
        let mut coded = copies.encode(preset, &views).map_err(|e| failed(&e))?;
        if fault == Some(Fault::Frame) {
            damage(coded.iter_mut().flat_map(|c| &mut c.chunks).map(|c| &mut c.1));
        }
        let mut by_cpu = Vec::with_capacity(cases.len());
        for (case, by_device) in cases.iter().zip(&coded) {
            by_cpu.push(self.check_frames(preset, case, by_device)?);
        }
        // The device decodes the processor's frames: it must read what it did not write.
        let mut back = copies.decode(None, &views, &by_cpu).map_err(|e| failed(&e))?;
        if fault == Some(Fault::Values) {
            damage(back.iter_mut());
        }
        for (case, back) in cases.iter().zip(&back) {
            if *back != case.data {
                return Err(differs(&case.name, "values decoded by the device"));
            }
        }
        Ok(())
    }

    /// Checks that the device's frames equal the processor's, and that the processor reads them;
    /// returns the processor's.
    fn check_frames(
        &self,
        preset: Preset,
        case: &Case,
        by_device: &CodedTensor,
    ) -> Result<CodedTensor> {
        let failed = |e: s4weights::format::Error| Failure::Test(format!("{}: {e}", case.name));
        let by_cpu = CodedTensor::by_cpu(&self.cpu, preset, &case.view()).map_err(failed)?;
        if format!("{:?}", by_cpu.plan) != format!("{:?}", by_device.plan) {
            return Err(differs(&case.name, "plan"));
        }
        if by_cpu.chunks.len() != by_device.chunks.len() {
            return Err(differs(&case.name, "number of chunks"));
        }
        for (i, (cpu, device)) in by_cpu.chunks.iter().zip(&by_device.chunks).enumerate() {
            if cpu.1 != device.1 {
                let at = cpu.1.iter().zip(&device.1).position(|(a, b)| a != b);
                let at = at.unwrap_or(cpu.1.len().min(device.1.len()));
                return Err(differs(&case.name, &format!("frame of chunk {i}, at byte {at}")));
            }
            if format!("{:?}", cpu.0) != format!("{:?}", device.0) {
                return Err(differs(&case.name, &format!("record of chunk {i}")));
            }
        }
        let back = by_device.decode_by_cpu(&self.cpu, &case.view()).map_err(failed)?;
        match back == case.data {
            true => Ok(by_cpu),
            false => Err(differs(&case.name, "values decoded from the device's frames")),
        }
    }
}
