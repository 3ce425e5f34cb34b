//! Preset `nvcomp`: the device's frames and those of the host's route must each be readable by both.

use s4_engine::cuda::testing::{CodedTensor, Copies};
use s4weights::cuda::{CudaEngine, DeviceInfo};
use s4weights::{CpuEngine, DType, Preset, Simd};

use super::case::{Case, Fault, cases, damage, differs};
use crate::error::{Failure, Result};

/// Whether there is a GPU with nvCOMP.
pub(super) fn is_here() -> bool {
    CpuEngine::writing(Simd::detect(), Preset::Nvcomp).is_ok()
}

/// Compares a device's route with the host's; without nvCOMP it says that nothing was tested.
pub(super) fn compare(
    engine: &CudaEngine,
    device: &DeviceInfo,
    simd: Simd,
    fault: Option<Fault>,
) -> Result<String> {
    let (writer, closed) = match CpuEngine::writing(simd, Preset::Nvcomp) {
        Ok(found) => found,
        Err(e) => return Ok(format!("preset `nvcomp` was not tested: {e}")),
    };
    let both = Both {
        engine,
        writer,
        reader: CpuEngine::reading(simd, &closed, true),
        trusted: engine.trusted(&closed),
        ordinal: device.ordinal,
    };
    let before = engine.chunks();
    let mut count = 0;
    for &dtype in DType::ALL {
        let cases = cases(dtype, Preset::Nvcomp);
        both.compare(&cases, fault)?;
        count += cases.len();
    }
    let after = engine.chunks();
    if (after.host, after.refused) != (before.host, before.refused) {
        return Err(Failure::Test(format!(
            "{}: nvCOMP did not handle every chunk: {after:?}",
            device.name
        )));
    }
    Ok(format!(
        "preset `nvcomp`: {count} tensors, encoded and decoded by both the device's and the host's route"
    ))
}

struct Both<'a> {
    engine: &'a CudaEngine,
    writer: CpuEngine,
    reader: CpuEngine,
    trusted: Option<s4weights::cuda::Trusted>,
    ordinal: u32,
}

impl Both<'_> {
    fn compare(&self, cases: &[Case], fault: Option<Fault>) -> Result<()> {
        let views: Vec<_> = cases.iter().map(Case::view).collect();
        let failed = |e: &dyn std::fmt::Display| {
            let first = cases.first().map_or("", |c| c.name.as_str());
            Failure::Test(format!("device {}, batch starting at `{first}`: {e}", self.ordinal))
        };
        let copies = Copies::new(self.engine, self.ordinal).map_err(|e| failed(&e))?;
        let mut by_device = copies.encode(Preset::Nvcomp, &views).map_err(|e| failed(&e))?;
        if fault == Some(Fault::LibraryFrame) {
            damage(by_device.iter_mut().flat_map(|c| &mut c.chunks).map(|c| &mut c.1));
        }
        let mut by_host = Vec::with_capacity(cases.len());
        for (case, device) in cases.iter().zip(&by_device) {
            by_host.push(self.check_frames(case, device)?);
        }
        for (frames, of) in [(&by_device, "the device"), (&by_host, "the host's route")] {
            let back = copies.decode(self.trusted.as_ref(), &views, frames);
            let mut back = back.map_err(|e| failed(&e))?;
            if fault == Some(Fault::LibraryValues) {
                damage(back.iter_mut());
            }
            for (case, back) in cases.iter().zip(&back) {
                if *back != case.data {
                    return Err(differs(
                        &case.name,
                        &format!("values decoded by the device from the frames of {of}"),
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks that the device's frames have the same streams as those of the host's route, which
    /// reads them; returns the host's.
    fn check_frames(&self, case: &Case, by_device: &CodedTensor) -> Result<CodedTensor> {
        let failed = |e: s4weights::format::Error| Failure::Test(format!("{}: {e}", case.name));
        let view = case.view();
        let by_host = CodedTensor::by_cpu(&self.writer, Preset::Nvcomp, &view).map_err(failed)?;
        let streams = |t: &CodedTensor| -> Vec<_> {
            let each = t.chunks.iter().map(|c| &c.0);
            each.map(|c| (c.plain, c.crc_raw, c.streams.map(|s| (s.codec, s.param)))).collect()
        };
        if streams(&by_host) != streams(by_device) {
            return Err(differs(&case.name, "streams"));
        }
        let back = by_device.decode_by_cpu(&self.reader, &view).map_err(failed)?;
        match back == case.data {
            true => Ok(by_host),
            false => Err(differs(&case.name, "values decoded from the device's frames")),
        }
    }
}
