//! Preset `nvcomp` on a device: the frames of the host's route, and values that come back. With a device, but
//! without nvCOMP, these tests say so and pass, unless `S4_REQUIRE_GPU=1`.

use std::borrow::Borrow;

use s4_codec_cpu::{Codecs, open_codecs};
use s4_engine::cuda::{CudaEngine, CudaError, CudaOptions, Destination, Trusted};
use s4_engine::{CpuEngine, EncodeJob, Engine, NoInputs, PlanJob, Preset, Scratch};
use s4_format::manifest::ClosedCodec;
use s4_format::{CodecId, DType, LayoutId, StreamEntry};
use s4_planes::Simd;

use crate::racing::{Racing, while_changing};
use crate::support::{Encoded, Gpu, Host, Span, Upload, compare, gpu, is_budget, on_gpu, tensors};

const ANS: ClosedCodec = ClosedCodec { codec: CodecId::NVCOMP_ANS, library_major: 6 };

/// A device, the host's engine that codes planes on it, and what decodes its frames on the device.
fn nvcomp(options: CudaOptions) -> Option<(Gpu, CudaEngine, CpuEngine, Trusted)> {
    let gpu = gpu()?;
    let host = match CpuEngine::writing(Simd::detect(), Preset::Nvcomp) {
        Ok((host, closed)) => {
            assert!(closed.contains(&ANS));
            host
        }
        Err(e) => {
            let required = std::env::var("S4_REQUIRE_GPU").is_ok_and(|v| v == "1");
            assert!(!required, "nvCOMP is required: {e}");
            println!("skipped: no nvCOMP");
            return None;
        }
    };
    let engine = gpu.engine(options);
    let trusted = engine.trusted(&[ANS]).expect("the same library");
    Some((gpu, engine, host, trusted))
}

fn by_host(engine: &CpuEngine, host: &Host) -> Encoded {
    let mut scratch = Scratch::default();
    let view = host.view();
    let plan = engine.plan(&PlanJob::new(Preset::Nvcomp, &view), &mut scratch).unwrap();
    let chunk = |chunk| {
        let mut frame = vec![];
        let e = engine
            .encode(
                &EncodeJob { view: &view, plan: &plan, chunk, inputs: &[] },
                &mut scratch,
                &mut frame,
            )
            .unwrap();
        (e, frame)
    };
    let chunks = (0..host.chunks(&plan)).map(chunk).collect();
    Encoded::new(plan, chunks)
}

fn by_device(engine: &CudaEngine, hosts: &[Host], uploads: &[impl Borrow<Upload>]) -> Vec<Encoded> {
    let tensors: Vec<_> = hosts.iter().zip(uploads).map(|(h, u)| h.on(u.borrow())).collect();
    let plans = engine.plan::<CudaError>(Preset::Nvcomp, &tensors, &NoInputs, None).unwrap();
    on_gpu(engine, hosts, uploads, Some(plans)).unwrap()
}

fn upload(gpu: &Gpu, hosts: &[Host]) -> Vec<Upload> {
    let skew = |i: usize, h: &Host| (i % 5 * h.dtype.value_width()) as u64;
    hosts.iter().enumerate().map(|(i, h)| gpu.upload(&h.data, skew(i, h))).collect()
}

/// Decodes the middle of every tensor, or all of it, and brings it back.
fn decode(
    gpu: &Gpu,
    engine: &CudaEngine,
    trusted: Option<&Trusted>,
    hosts: &[Host],
    encoded: &[Encoded],
    whole: bool,
) -> Result<Vec<Vec<u8>>, CudaError> {
    let range = |h: &Host| if whole { 0..h.data.len() } else { h.data.len() / 3..h.data.len() / 2 };
    let fill = |(i, h): (usize, &Host)| gpu.upload(&vec![0xee; range(h).len()], i as u64 % 7);
    let to: Vec<Upload> = hosts.iter().enumerate().map(fill).collect();
    let memory: Vec<_> = to.iter().map(Upload::memory).collect();
    let ordinal = gpu.device.ordinal();
    engine.decode::<CudaError>(&memory, trusted, |decoder| {
        let mut span = Span::default();
        for (t, (host, e)) in hosts.iter().zip(encoded).enumerate() {
            let wanted = range(host);
            let mut first = 0;
            for chunk in 0..e.chunks.len() {
                let bytes = host.chunk_bytes(&e.plan, chunk as u64) as usize;
                let (from, end) = (wanted.start.max(first), wanted.end.min(first + bytes));
                if from < end {
                    let at = (from - wanted.start) as u64;
                    let to = memory[t].part(at, (end - from) as u64)?;
                    let destination = Destination { from: (from - first) as u64, to };
                    if span.bytes.len() + e.chunks[chunk].1.len() + 16 > decoder.room() {
                        std::mem::take(&mut span).push(decoder, ordinal)?;
                    }
                    span.add(t, e.spec(host), chunk, e, bytes as u64, vec![destination]);
                }
                first += bytes;
            }
        }
        span.push(decoder, ordinal)
    })?;
    Ok(to.iter().map(|u| gpu.download(u.address, u.bytes)).collect())
}

/// Codec and parameter of each stream of each frame.
fn codecs(e: &Encoded) -> Vec<Vec<(CodecId, u8)>> {
    let of = |s: &StreamEntry| (s.codec, s.param);
    e.chunks.iter().map(|c| c.0.streams.iter().map(of).collect()).collect()
}

#[test]
fn every_pattern_of_every_dtype_is_as_by_the_host() {
    let Some((gpu, engine, host_engine, trusted)) = nvcomp(CudaOptions::default()) else { return };
    let sizes: &[usize] = match gpu.is_slow() {
        true => &[0, 1, 80, 300, 9001, 70_001],
        false => &[0, 1, 2, 255, 4096, 70_003, 300_001],
    };
    let (mut ans, mut gdeflate, mut plain) = (0, 0, 0);
    for hosts in tensors(sizes).chunk_by(|a, b| a.dtype == b.dtype) {
        let uploads = upload(&gpu, hosts);
        let encoded = by_device(&engine, hosts, &uploads);
        drop(uploads);
        for (host, e) in hosts.iter().zip(&encoded) {
            let expected = by_host(&host_engine, host);
            if let Some(difference) = compare(host, e, &expected) {
                // The library need not write the same bytes twice; its stand-in does.
                assert!(!gpu.is_slow(), "{difference}");
                assert_eq!(codecs(e), codecs(&expected), "{difference}");
                println!("other bytes: {difference}");
            }
            plain += e.chunks.iter().filter(|c| c.0.plain).count();
            let streams: Vec<_> = codecs(e).concat();
            ans += streams.iter().filter(|s| s.0 == CodecId::NVCOMP_ANS).count();
            gdeflate += streams.iter().filter(|s| s.0 == CodecId::GDEFLATE).count();
        }
        for whole in [true, false] {
            let back = decode(&gpu, &engine, Some(&trusted), hosts, &encoded, whole).unwrap();
            for (host, back) in hosts.iter().zip(back) {
                let n = host.data.len();
                let range = if whole { 0..n } else { n / 3..n / 2 };
                assert!(back == host.data[range], "{}: decoded values differ", host.name);
            }
        }
    }
    let chunks = engine.chunks();
    println!("{chunks:?}, {ans} streams of ANS, {gdeflate} of GDeflate, {plain} plain chunks");
    assert!(ans > 10 && gdeflate > 10 && plain > 10);
    assert!(chunks.refused == 0 && chunks.host == 0, "{chunks:?}");
}

/// More than the lanes have room for at one time, together with tensors of other plans.
#[test]
fn many_groups_and_mixed_plans_keep_their_order() {
    let options = CudaOptions { scratch: 64 << 20, pinned: 16 << 20, ..CudaOptions::default() };
    let Some((gpu, engine, host_engine, trusted)) = nvcomp(options) else { return };
    let n = if gpu.is_slow() { 6_000_000 } else { 60_000_000 };
    let data = (0..n).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 27) as u8).collect();
    let large = Host::new("large", DType::BFloat16, data);
    let small: Vec<_> = tensors(&[9001]).into_iter().step_by(7).collect();
    let hosts: Vec<Host> = small.iter().cloned().chain([large]).chain(small.clone()).collect();
    let uploads = upload(&gpu, &hosts);
    let on: Vec<_> = hosts.iter().zip(&uploads).map(|(h, u)| h.on(u)).collect();
    let mut plans = engine.plan::<CudaError>(Preset::Nvcomp, &on, &NoInputs, None).unwrap();
    let others = engine.plan::<CudaError>(Preset::Fast, &on, &NoInputs, None).unwrap();
    for (i, plan) in plans.iter_mut().enumerate().filter(|p| p.0 % 3 == 1) {
        *plan = others[i].clone();
    }
    let encoded = on_gpu(&engine, &hosts, &uploads, Some(plans)).unwrap();
    let used = engine.scratch_high_water(gpu.device.ordinal());
    // The emulated driver counts all pools together.
    assert!(gpu.is_slow() || used <= 64 << 20, "{used} bytes of device memory");
    let back = decode(&gpu, &engine, Some(&trusted), &hosts, &encoded, true).unwrap();
    for (host, back) in hosts.iter().zip(back) {
        assert!(back == host.data, "{}: decoded values differ", host.name);
    }
    let last = hosts.len() - 1;
    let expected = by_host(&host_engine, &hosts[last]);
    let (found, expected) = (codecs(&encoded[last]), codecs(&expected));
    assert!(last % 3 == 1 || found == expected, "{found:?} {expected:?}");
}

#[test]
fn a_budget_without_room_is_said() {
    let Some((gpu, ..)) = nvcomp(CudaOptions::default()) else { return };
    let small = gpu.engine(CudaOptions { scratch: 8 << 20, ..CudaOptions::default() });
    let host = Host::new("t", DType::Float64, vec![7; 1 << 20]);
    let uploads = upload(&gpu, std::slice::from_ref(&host));
    let plans = by_host(&CpuEngine::writing(Simd::detect(), Preset::Nvcomp).unwrap().0, &host);
    let result = on_gpu(&small, &[host], &uploads, Some(vec![plans.plan]));
    assert!(result.is_err_and(|e| is_budget(&e)));
}

/// Frames whose coded streams are damaged: without a new checksum the library never sees them.
#[test]
fn damage_is_found_and_strangers_are_refused() {
    let Some((gpu, engine, host_engine, trusted)) = nvcomp(CudaOptions::default()) else { return };
    let data = (0..120_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 28) as u8).collect();
    let host = Host::new("t", DType::BFloat16, data);
    let good = by_host(&host_engine, &host);
    assert!(codecs(&good).concat().iter().any(|s| s.0 == CodecId::NVCOMP_ANS));
    let hosts = [host];
    let run = |e: Encoded, trusted: Option<&Trusted>| {
        decode(&gpu, &engine, trusted, &hosts, &[e], true).map_err(|e| e.to_string())
    };
    let copy = || Encoded::new(good.plan.clone(), good.chunks.clone());
    assert_eq!(run(copy(), Some(&trusted)).unwrap()[0], hosts[0].data);
    // Not trusted, or not listed: refused by name.
    let unlisted = engine.trusted(&[]).expect("a library");
    for trust in [None, Some(&unlisted)] {
        let e = run(copy(), trust).unwrap_err();
        assert!(e.contains("nvcomp-ans") && e.contains("closed"), "{e}");
    }
    assert!(engine.trusted(&[ClosedCodec { library_major: 5, ..ANS }]).is_none());
    let frame = &good.chunks[0].1;
    for at in [1, 8, frame.len() / 3, frame.len() / 2] {
        let mut bad = copy();
        bad.chunks[0].1[at] ^= 0x10;
        let e = run(bad, Some(&trusted)).unwrap_err();
        assert!(e.contains("chunk 0"), "byte {at}: {e}");
    }
    // A wrong checksum of the values, in a frame with a right one of its own.
    let mut bad = copy();
    bad.chunks[0].0.crc_raw ^= 1;
    let e = run(bad, Some(&trusted)).unwrap_err();
    assert!(e.contains("decoded values"), "{e}");
}

/// Integers need no closed codec: where there is no library, the CPU's codecs write and read the same
/// bitstreams.
#[test]
fn open_streams_are_read_without_trust() {
    let Some((gpu, engine, ..)) = nvcomp(CudaOptions::default()) else { return };
    if gpu.is_slow() {
        return; // the stand-in's streams are not GDeflate
    }
    let data: Vec<u8> = (0..400_000u32).map(|i| (i / 1000) as u8).collect();
    let host = Host::new("ints", DType::UInt8, data);
    let uploads = upload(&gpu, std::slice::from_ref(&host));
    let encoded = by_device(&engine, std::slice::from_ref(&host), &uploads);
    assert!(codecs(&encoded[0])[0].contains(&(CodecId::GDEFLATE, 0)), "{:?}", codecs(&encoded[0]));
    let codecs: Codecs = open_codecs(Simd::detect());
    assert!(
        codecs.get(CodecId::GDEFLATE).is_ok() && encoded[0].plan.plan.layout == LayoutId::WHOLE
    );
    let hosts = [host];
    let back = decode(&gpu, &engine, None, &hosts, &encoded, true).unwrap();
    assert!(back[0] == hosts[0].data && engine.chunks().host > 0);
}

#[test]
fn frames_of_changing_values_decode() {
    let Some((gpu, engine, _, trusted)) = nvcomp(CudaOptions::default()) else { return };
    let tensors = Racing::all(&gpu);
    let (hosts, uploads): (Vec<_>, Vec<_>) =
        tensors.iter().map(|t| (t.host.clone(), &t.upload)).unzip();
    while_changing(&gpu, &tensors, || {
        for _ in 0..if gpu.is_slow() { 4 } else { 30 } {
            let encoded = by_device(&engine, &hosts, &uploads);
            let back = decode(&gpu, &engine, Some(&trusted), &hosts, &encoded, true).unwrap();
            for (t, values) in tensors.iter().zip(back) {
                assert!(t.had(&gpu, &values), "{}: a value that never was", t.host.name);
            }
        }
    });
}
