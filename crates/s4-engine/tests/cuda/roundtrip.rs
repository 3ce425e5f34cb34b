//! Frames equal to the CPU's, and values that come back.

use s4_engine::cuda::{CudaError, CudaOptions, Destination, DeviceMemory};
use s4_engine::{Engine, Jobs, NoInputs, PlaneCoding, Preset, TensorPlan, TensorValues};
use s4_format::layout::Planes;
use s4_format::{DType, LayoutId, Plan};
use s4_planes::Width;
use s4_planes::patterns::{self, Kind};

use crate::support::{
    Gpu, Host, Span, Upload, compare, decode, gpu, gpu_of, on_cpu, on_gpu, tensors,
};

fn upload(gpu: &Gpu, hosts: &[Host]) -> Vec<Upload> {
    // Values at addresses that are no multiple of 16, too.
    let skew = |i: usize, h: &Host| (i % 5 * h.dtype.value_width()) as u64;
    hosts.iter().enumerate().map(|(i, h)| gpu.upload(&h.data, skew(i, h))).collect()
}

/// Checks that frames equal the CPU's, and that both engines' frames decode on the device.
fn check(gpu: &Gpu, hosts: &[Host], plans: Option<Vec<TensorPlan>>) {
    let engine = gpu.engine(CudaOptions::default());
    let uploads = upload(gpu, hosts);
    let encoded = on_gpu(&engine, hosts, &uploads, plans.clone()).unwrap();
    let mut differences = vec![];
    for (i, (host, e)) in hosts.iter().zip(&encoded).enumerate() {
        let plan = plans.as_ref().map(|p| p[i].clone());
        differences.extend(compare(host, e, &on_cpu(host, plan)));
    }
    let count = differences.len();
    assert!(count == 0, "{count} of {} tensors differ: {differences:#?}", hosts.len());
    drop(uploads);
    let back = decode(gpu, &engine, hosts, &encoded).unwrap();
    for (host, back) in hosts.iter().zip(back) {
        assert!(back == host.data, "{}: decoded values differ", host.name);
    }
    // Otherwise the CPU would be compared with itself.
    let chunks = engine.chunks();
    println!("{chunks:?}");
    assert!(chunks.refused == 0 && chunks.device > 0, "{chunks:?}");
}

#[test]
fn every_pattern_of_every_dtype_is_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let sizes: &[usize] = match gpu.is_slow() {
        true => &[0, 1, 300, 4096, 9001],
        false => &[0, 1, 2, 255, 4096, 8191, 70_003, 200_001],
    };
    // One call for all of a dtype: tensors of every size next to each other.
    for hosts in tensors(sizes).chunk_by(|a, b| a.dtype == b.dtype) {
        check(&gpu, hosts, None);
    }
}

/// Plans that the planner would not choose for such data: every layout with every coding.
#[test]
fn every_layout_with_every_coding_is_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let (mut hosts, mut plans) = (vec![], vec![]);
    let n = if gpu.is_slow() { 5000 } else { 60_000 };
    let kinds = [
        (DType::BFloat16, Kind::BF16),
        (DType::Float32, Kind::F32),
        (DType::Float64, Kind::F64),
        (DType::Float8E4M3Fn, Kind::F8_E4M3),
    ];
    use LayoutId as L;
    for (dtype, kind) in kinds {
        for pattern in ["like-weights", "like-squares", "sparse", "random", "zeros", "counting"] {
            let data = patterns::all(kind, n).find(|p| p.0 == pattern).unwrap().1;
            let host = Host::new(format!("{dtype} {pattern}"), dtype, data);
            for layout in [L::WHOLE, L::BYTES, L::FIELDS, L::FIELDS_SIGN] {
                let Ok(planes) = Planes::new(layout, dtype.value_width(), 0) else { continue };
                for coding in
                    [PlaneCoding::RAW, PlaneCoding::RANS8, PlaneCoding::RANS12, PlaneCoding::ZSTD]
                {
                    let mut plan = on_cpu(&host, None).plan;
                    plan.plan = Plan::direct(layout);
                    plan.planes = vec![coding; planes.sizes().len()];
                    if layout == L::FIELDS_SIGN {
                        plan.planes[2] = PlaneCoding::BITS7;
                    }
                    hosts.push(Host {
                        name: format!("{} {layout} {coding:?}", host.name),
                        ..host.clone()
                    });
                    plans.push(plan);
                }
            }
        }
    }
    check(&gpu, &hosts, Some(plans));
}

#[test]
fn real_tensors_are_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata");
    // If the program runs elsewhere than it was built, the folder is the repository's.
    let folder = if std::path::Path::new(folder).is_dir() { folder } else { "testdata" };
    let mut hosts = vec![];
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let bytes = std::fs::read(&path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (name, t) in file.tensors() {
            let dtype = match t.dtype() {
                safetensors::Dtype::BF16 => DType::BFloat16,
                safetensors::Dtype::F32 => DType::Float32,
                _ => DType::Bytes,
            };
            let most = if gpu.is_slow() { 40_000 } else { usize::MAX };
            let data = t.data()[..t.data().len().min(most)].to_vec();
            hosts.push(Host::new(name, dtype, data));
        }
    }
    assert!(hosts.len() > 10, "testdata has {} tensors", hosts.len());
    check(&gpu, &hosts, None);
}

#[test]
fn several_chunks_share_tables_and_parts_of_them_come_back() {
    let Some(gpu) = gpu() else { return };
    let mut hosts = vec![];
    for (dtype, kind, n) in
        [(DType::BFloat16, Kind::BF16, 140_000), (DType::Float32, Kind::F32, 70_000)]
    {
        let data = patterns::all(kind, n).find(|p| p.0 == "like-weights").unwrap().1;
        hosts.push(Host::new(format!("{dtype}"), dtype, data));
    }
    check(&gpu, &hosts, None);
    let engine = gpu.engine(CudaOptions::default());
    let encoded: Vec<_> = hosts.iter().map(|h| on_cpu(h, None)).collect();
    assert!(encoded.iter().any(|e| e.chunks.iter().any(|c| c.0.shared)), "no shared tables");
    for (host, e) in hosts.iter().zip(&encoded) {
        parts(&gpu, &engine, host, e);
    }
}

/// Tensors of lengths around the one from which a frame is shorter than the values. Right below it, the stream is
/// shorter and uses the shared tables, but the frame is not: the chunk is plain, and no chunk needs the tables.
#[test]
fn a_plain_chunk_needs_no_shared_tables() {
    let Some(gpu) = gpu() else { return };
    let random = patterns::all(Kind::int(Width::B1), 600_000).find(|p| p.0 == "random").unwrap().1;
    // Coding saves a little: 0.36 bits a byte.
    let data: Vec<u8> = random.iter().map(|b| b % 200).collect();
    let host = |n: usize| Host::new(format!("{n} bytes"), DType::UInt8, data[..n].to_vec());
    let plan = on_cpu(&host(data.len()), None).plan;
    let hosts: Vec<_> = (500..8000).step_by(100).map(host).collect();
    let of_cpu: Vec<_> = hosts.iter().map(|h| on_cpu(h, Some(plan.clone())).chunks[0].0).collect();
    assert!(of_cpu.iter().any(|c| c.plain) && of_cpu.iter().any(|c| c.shared));
    check(&gpu, &hosts, Some(vec![plan; hosts.len()]));
}

/// Decodes two runs of bytes of each chunk, and checks that nothing else is written.
fn parts(
    gpu: &Gpu,
    engine: &s4_engine::cuda::CudaEngine,
    host: &Host,
    e: &crate::support::Encoded,
) {
    let to = gpu.upload(&vec![0xee; host.data.len()], 3);
    let size = (host.dtype.value_width() as u64) << e.plan.chunk_log2;
    let runs = |bytes: u64| [(1, bytes / 3), (bytes / 2 + 1, bytes / 4)];
    engine
        .decode::<CudaError>(&[to.memory()], None, |decoder| {
            let mut span = Span::default();
            for chunk in 0..e.chunks.len() {
                let bytes = host.chunk_bytes(&e.plan, chunk as u64);
                let destination = |(from, len): (u64, u64)| -> Result<Destination, CudaError> {
                    let to: DeviceMemory = to.memory().part(chunk as u64 * size + from, len)?;
                    Ok(Destination { from, to })
                };
                let destinations =
                    runs(bytes).map(destination).into_iter().collect::<Result<_, _>>()?;
                span.add(0, e.spec(host), chunk, e, bytes, destinations);
            }
            span.push(decoder, 0)
        })
        .unwrap();
    let mut expected = vec![0xee; host.data.len()];
    for chunk in 0..e.chunks.len() as u64 {
        for (from, len) in runs(host.chunk_bytes(&e.plan, chunk)) {
            let at = (chunk * size + from) as usize..(chunk * size + from + len) as usize;
            expected[at.clone()].copy_from_slice(&host.data[at]);
        }
    }
    assert!(gpu.download(to.address, to.bytes) == expected, "{}", host.name);
}

#[test]
fn tensors_of_several_devices_are_encoded_in_their_order() {
    let Some(second) = gpu_of(1) else { return };
    let n = if second.is_slow() { 20_000 } else { 3_000_000 };
    let data = patterns::all(Kind::BF16, n).find(|p| p.0 == "like-weights").unwrap().1;
    let host = Host::new("two devices", DType::BFloat16, data);
    let on_second = [second.upload(&host.data, 0), second.upload(&host.data, 6)];
    let first = second.cuda.device(0).unwrap();
    let engine = second.engine(CudaOptions::default());
    let stream = std::sync::Arc::new(s4_codec_gpu::Stream::new(&first).unwrap());
    let pool = s4_codec_gpu::Pool::new(&first, 1 << 30);
    let buffer = pool.alloc(&stream, host.data.len() as u64, "a test").unwrap();
    let pinned = s4_codec_gpu::Pinned::new(&first, host.data.len()).unwrap();
    // SAFETY: memory of this test alone, and the copy is waited for.
    let memory = unsafe {
        pinned.slice_mut(0, host.data.len()).copy_from_slice(&host.data);
        stream.copy_to_device(&pinned, 0, host.data.len(), buffer.address()).unwrap();
        stream.synchronize().unwrap();
        DeviceMemory::new(0, buffer.address(), buffer.bytes(), 0)
    };
    let middle = TensorValues { values: memory.into(), ..host.on(&on_second[0]) };
    let tensors = [host.on(&on_second[0]), middle, host.on(&on_second[1])];
    let plans = engine.plan::<CudaError>(Preset::Fast, &tensors, &NoInputs, None).unwrap();
    let cpu = on_cpu(&host, None);
    let mut seen = vec![];
    engine
        .encode(&Jobs::<CudaError>::new(&tensors, &plans), |frames| {
            for frame in frames {
                assert!(frame.bytes == cpu.chunks[frame.chunk as usize].1, "{}", frame.tensor);
                seen.push((frame.tensor, frame.chunk));
            }
            Ok(())
        })
        .unwrap();
    assert!(seen.is_sorted() && seen.len() == 3 * cpu.chunks.len());
}
