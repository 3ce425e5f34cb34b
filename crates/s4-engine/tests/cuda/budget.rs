//! Memory: budgets kept, nothing left behind, and arguments that are refused.

use s4_codec_gpu::Pool;
use s4_engine::cuda::{CudaError, CudaOptions, DeviceMemory, FetchItem, GpuError};
use s4_engine::{Engine, Jobs, NoInputs, Preset, TensorValues};
use s4_format::DType;
use s4_planes::patterns::{self, Kind};

use crate::support::{Gpu, Host, decode, gpu, is_budget, on_cpu, on_gpu};

/// A tensor of many chunks, and small ones.
fn hosts(gpu: &Gpu) -> Vec<Host> {
    let n = if gpu.is_slow() { 150_000 } else { 40_000_000 };
    let of = |dtype, kind, n| {
        let data = patterns::all(kind, n).find(|p| p.0 == "like-weights").unwrap().1;
        Host::new(format!("{dtype} {n}"), dtype, data)
    };
    let mut out = vec![of(DType::BFloat16, Kind::BF16, n), of(DType::Float64, Kind::F64, n / 8)];
    out.extend((0..300).map(|i| of(DType::Float32, Kind::F32, 1 + i % 7)));
    out
}

/// The most device memory that drivers keep for an engine that does nothing.
const OF_DRIVER: u64 = 4 << 20;

#[test]
fn scratch_stays_within_its_budget_and_nothing_is_left() {
    let Some(gpu) = gpu() else { return };
    let hosts = hosts(&gpu);
    let uploads: Vec<_> = hosts.iter().map(|h| gpu.upload(&h.data, 0)).collect();
    let cpu: Vec<_> = hosts.iter().map(|h| on_cpu(h, None)).collect();
    // Run once, so that the driver holds what it keeps for kernels.
    on_gpu(&gpu.engine(CudaOptions::default()), &hosts, &uploads, None).unwrap();
    let free = || {
        gpu.stream.synchronize().unwrap();
        gpu.device.memory().unwrap().0
    };
    let before = free();
    for scratch in [32 << 20, 100 << 20, 256 << 20] {
        for pinned in [9 << 20, 96 << 20] {
            let engine = gpu.engine(CudaOptions { scratch, pinned, ..CudaOptions::default() });
            let encoded = on_gpu(&engine, &hosts, &uploads, None).unwrap();
            for (e, cpu) in encoded.iter().zip(&cpu) {
                assert!(e.chunks.iter().zip(&cpu.chunks).all(|(a, b)| a.1 == b.1));
            }
            let peak = engine.scratch_high_water(0);
            println!("budget {scratch}, pinned {pinned}: at most {peak} bytes of device memory");
            if !gpu.is_slow() {
                assert!((1..=scratch).contains(&peak), "{peak} of {scratch}");
            }
            // Between calls the engine keeps no device memory; the driver some, for page-locked memory and streams.
            let idle = free();
            assert!(
                idle <= before && before - idle <= OF_DRIVER,
                "{idle} of {before} after encoding"
            );
            on_gpu(&engine, &hosts, &uploads, None).unwrap();
            assert_eq!(free(), idle, "after encoding again");
            if scratch == 32 << 20 {
                for (host, back) in
                    hosts.iter().zip(decode(&gpu, &engine, &hosts, &encoded).unwrap())
                {
                    assert!(back == host.data, "{}", host.name);
                }
            }
            drop(engine);
        }
    }
    assert_eq!(free(), before, "device memory is left allocated");
}

/// The engine takes at most half of what a framework left free, as long as it can work in that.
#[test]
fn little_free_memory_means_less_scratch_and_no_detour() {
    let Some(gpu) = gpu() else { return };
    if !gpu.is_slow() {
        println!("skipped: it would fill a real device");
        return;
    }
    let hosts = hosts(&gpu);
    let uploads: Vec<_> = hosts.iter().map(|h| gpu.upload(&h.data, 0)).collect();
    let tensors: Vec<_> = hosts.iter().zip(&uploads).map(|(h, u)| h.on(u)).collect();
    let cpu: Vec<_> = hosts.iter().map(|h| on_cpu(h, None)).collect();
    let framework = Pool::new(&gpu.device, u64::MAX);
    let free = || gpu.device.memory().unwrap().0;
    for left in [600 << 20, 150 << 20, 70 << 20, 40 << 20, 17 << 20] {
        // In whole pages.
        let taken = (free() - left) & !((2 << 20) - 1);
        let taken = framework.alloc(&gpu.stream, taken, "a framework").unwrap();
        let before = free();
        let engine = gpu.engine(CudaOptions::default());
        let plans = engine.plan::<CudaError>(Preset::Fast, &tensors, &NoInputs, None).unwrap();
        let mut least = u64::MAX;
        engine
            .encode(&Jobs::<CudaError>::new(&tensors, &plans), |frames| {
                for frame in frames {
                    least = least.min(free());
                    let expected = &cpu[frame.tensor].chunks[frame.chunk as usize].1;
                    assert!(frame.bytes == expected, "{}", hosts[frame.tensor].name);
                }
                Ok(())
            })
            .unwrap();
        assert!(least >= (left / 2).min(left - (16 << 20)), "{least} of {left} were left");
        assert!(decode(&gpu, &engine, &hosts[1..2], &cpu[1..2]).unwrap()[0] == hosts[1].data);
        let chunks = engine.chunks();
        assert!(chunks.device > 0 && chunks.host + chunks.refused == 0, "{chunks:?}");
        assert_eq!(free(), before, "memory is kept");
        drop(taken);
    }
    let taken = framework.alloc(&gpu.stream, free() - (9 << 20), "a framework").unwrap();
    let refused = on_gpu(&gpu.engine(CudaOptions::default()), &hosts, &uploads, None).err();
    let refused = refused.expect("refused");
    assert!(matches!(refused, CudaError::Gpu(GpuError::OutOfMemory { .. })), "{refused}");
    drop(taken);
}

#[test]
fn budgets_too_small_for_a_chunk_are_refused_by_name() {
    let Some(gpu) = gpu() else { return };
    let host = Host::new("x", DType::Float32, vec![1; 40_000]);
    let uploads = [gpu.upload(&host.data, 0)];
    let hosts = [host];
    for options in [
        CudaOptions { scratch: 8 << 20, ..CudaOptions::default() },
        CudaOptions { pinned: 1 << 20, ..CudaOptions::default() },
    ] {
        let e = on_gpu(&gpu.engine(options), &hosts, &uploads, None).err().expect("refused");
        assert!(is_budget(&e), "{e}");
    }
}

#[test]
fn an_error_of_the_sink_ends_the_work_and_the_engine_goes_on() {
    let Some(gpu) = gpu() else { return };
    let n = if gpu.is_slow() { 300_000 } else { 20_000_000 };
    let data = patterns::all(Kind::BF16, n).find(|p| p.0 == "like-weights").unwrap().1;
    let host = Host::new("x", DType::BFloat16, data);
    let upload = gpu.upload(&host.data, 0);
    let engine = gpu.engine(CudaOptions { scratch: 32 << 20, ..CudaOptions::default() });
    let tensors = [host.on(&upload)];
    let plans = engine.plan::<CudaError>(Preset::Fast, &tensors, &NoInputs, None).unwrap();
    let mut seen = 0;
    let stopped = engine.encode(&Jobs::<CudaError>::new(&tensors, &plans), |frames| {
        for _ in frames {
            seen += 1;
            if seen == 2 {
                return Err(GpuError::Argument("enough".into()).into());
            }
        }
        Ok(())
    });
    assert_eq!(stopped, Err(GpuError::Argument("enough".into()).into()));
    assert_eq!(seen, 2);
    let again = on_gpu(&engine, &[host], &[upload], None).unwrap();
    assert!(again[0].chunks.len() > 2);
}

#[test]
fn a_device_is_found_open_while_another_call_uses_it() {
    let Some(gpu) = gpu() else { return };
    let host = Host::new("x", DType::Float32, vec![1; 400_000]);
    let upload = gpu.upload(&host.data, 0);
    let engine = gpu.engine(CudaOptions::default());
    for _ in 0..2 {
        engine.open(0).unwrap();
    }
    let tensors = [host.on(&upload)];
    let plans = engine.plan::<CudaError>(Preset::Fast, &tensors, &NoInputs, None).unwrap();
    let mut seen = 0;
    engine
        .encode(&Jobs::<CudaError>::new(&tensors, &plans), |frames| {
            seen += frames.len();
            engine.open(0)
        })
        .unwrap();
    assert!(seen > 0);
    assert!(engine.open(99).is_err());
}

#[test]
fn memory_that_is_not_the_devices_is_refused() {
    let Some(gpu) = gpu() else { return };
    let engine = gpu.engine(CudaOptions::default());
    let host = Host::new("x", DType::Float32, vec![7; 4096]);
    let upload = gpu.upload(&host.data, 0);
    let on_host = host.data.as_ptr() as u64;
    for (address, bytes) in [(on_host, 4096), (upload.address, 1 << 40), (8, 4096)] {
        // SAFETY: it is not device memory, as the engine must find before it uses it.
        let memory = unsafe { DeviceMemory::new(0, address, bytes, 0) };
        let refused = engine.fetch::<CudaError>(&[FetchItem::all(memory)], |_| Ok(()));
        assert!(matches!(refused, Err(CudaError::Gpu(_))), "{refused:?}");
    }
    let memory = upload.memory();
    let refused =
        engine.fetch::<CudaError>(&[FetchItem::of(memory, std::iter::once(0..4097))], |_| Ok(()));
    assert!(matches!(refused, Err(CudaError::Gpu(_))), "{refused:?}");
    // SAFETY: never used: there is no such device.
    let memory = unsafe { DeviceMemory::new(999, upload.address, 16, 0) };
    let refused = engine.fetch::<CudaError>(&[FetchItem::all(memory)], |_| Ok(()));
    assert!(matches!(refused, Err(CudaError::Gpu(GpuError::Argument(_)))), "{refused:?}");
    let plan = on_cpu(&host, None).plan;
    let short = TensorValues { shape: &[3], ..host.on(&upload) };
    let refused = engine.encode(&Jobs::<CudaError>::new(&[short], &[plan]), |_| Ok(()));
    assert!(matches!(refused, Err(CudaError::Format { tensor: 0, .. })), "{refused:?}");
}

#[test]
fn small_tensors_are_fetched_in_batches_and_in_order() {
    let Some(gpu) = gpu() else { return };
    let engine = gpu.engine(CudaOptions { scratch: 32 << 20, ..CudaOptions::default() });
    let bytes = |i: usize| (0..i * 37 % 5000).map(|j| (i * 31 + j) as u8).collect::<Vec<_>>();
    let all: Vec<_> = (0..3000).map(bytes).collect();
    let upload = gpu.upload(&all.concat(), 1);
    let mut first = 0;
    let item = |bytes: &Vec<u8>| {
        let part = upload.memory().part(first, bytes.len() as u64).unwrap();
        first += bytes.len() as u64;
        let half = part.bytes() / 2;
        FetchItem::of(part, [0..half, half..part.bytes()])
    };
    let items: Vec<_> = all.iter().map(item).collect();
    let mut next = 0;
    engine
        .fetch::<CudaError>(&items, |batch| {
            for (number, bytes) in batch {
                assert_eq!(*number, next);
                assert!(*bytes == all[next], "item {next}");
                next += 1;
            }
            Ok(())
        })
        .unwrap();
    assert_eq!(next, all.len());
}
