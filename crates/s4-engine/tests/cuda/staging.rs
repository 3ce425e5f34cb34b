//! Copies of tensors on the device: what they hold, what they cost, and what is refused.

use std::collections::BTreeMap;

use s4_codec_gpu::{GpuError, Pinned};
use s4_engine::cuda::{CudaError, CudaOptions, DeviceMemory, StagedCopies, Stager};
use s4_engine::{Engine, Jobs, TensorValues};
use s4_format::DType;
use s4_planes::patterns::{self, Kind};

use crate::support::{Gpu, Host, Upload, gpu, gpu_of, on_cpu, on_gpu};

/// Sizes around those of spans and of tensors that the driver copies one by one, and 0.
const SIZES: [usize; 11] = [
    0,
    1,
    3,
    16,
    255,
    4097,
    (256 << 10) - 1,
    (256 << 10) + 5,
    (16 << 20) - 1,
    16 << 20,
    (17 << 20) + 7,
];
/// A device maps memory in pages of this many bytes.
const PAGE: u64 = 2 << 20;

/// Bytes that differ from tensor to tensor, at addresses of every alignment.
fn tensors(gpu: &Gpu) -> Vec<(Vec<u8>, Upload)> {
    let data = |(i, &n): (usize, &usize)| {
        let bytes: Vec<u8> = (0..n).map(|at| (at * 31 + at / 256 * 7 + i * 101) as u8).collect();
        let upload = gpu.upload(&bytes, i as u64 % 5);
        (bytes, upload)
    };
    SIZES.iter().chain(&SIZES[1..7]).enumerate().map(data).collect()
}

fn all(tensors: &[(Vec<u8>, Upload)]) -> Vec<DeviceMemory> {
    tensors.iter().map(|t| t.1.memory()).collect()
}

fn check(gpu: &Gpu, copies: &StagedCopies, tensors: &[(Vec<u8>, Upload)]) {
    assert_eq!(copies.memory().len(), tensors.len());
    for (i, (m, t)) in copies.memory().iter().zip(tensors).enumerate() {
        assert_eq!((m.bytes(), m.ordinal()), (t.0.len() as u64, 0));
        assert!(gpu.download(m.address(), m.bytes()) == t.0, "tensor {i} of {} bytes", t.0.len());
    }
}

#[test]
fn copies_are_what_was_there_whatever_comes_later() {
    let Some(gpu) = gpu() else { return };
    let tensors = tensors(&gpu);
    let stager = Stager::new(&gpu.cuda, 0).unwrap();
    for round in 0..3 {
        let copies = stager.copy(&all(&tensors), 0).unwrap();
        let needed: u64 = tensors.iter().map(|t| t.0.len() as u64).sum();
        let most = (needed + (64 << 10)).next_multiple_of(PAGE);
        assert!(copies.bytes() >= needed && copies.bytes() <= most, "{round}");
        // The legacy default stream, on which the originals are used, comes after the copies.
        // SAFETY: there is always that stream.
        unsafe { copies.hold(0).unwrap() };
        for t in &tensors {
            overwrite(&gpu, &t.1, &vec![0xee; t.0.len()]);
        }
        copies.wait().unwrap();
        check(&gpu, &copies, &tensors);
        for t in &tensors {
            overwrite(&gpu, &t.1, &t.0);
        }
    }
    let nothing = stager.copy(&[], 0).unwrap();
    assert_eq!((nothing.memory().len(), nothing.bytes()), (0, 0));
}

#[test]
fn copies_on_the_host_are_what_was_there_in_memory_that_is_used_again() {
    let Some(gpu) = gpu() else { return };
    let tensors = tensors(&gpu);
    let bytes: u64 = tensors.iter().map(|t| t.0.len() as u64).sum();
    let engine = gpu.engine(CudaOptions { frames: bytes + (64 << 10), ..CudaOptions::default() });
    let none = &BTreeMap::new();
    let (mut address, mut taken) = (None, None);
    for _ in 0..3 {
        let mut copies = engine.copy_to_host(&all(&tensors), none).unwrap();
        for t in &tensors {
            overwrite(&gpu, &t.1, &vec![0xee; t.0.len()]);
        }
        assert!(copies.values().unwrap().eq(tensors.iter().map(|t| &t.0[..])));
        assert!(copies.addresses().all(|address| address % 64 == 0));
        for t in &tensors {
            overwrite(&gpu, &t.1, &t.0);
        }
        let memory = engine.frame_memory();
        assert_eq!((memory.taken, memory.idle), (copies.bytes(), 0));
        let first = copies.addresses().next();
        assert_eq!(*address.get_or_insert(first), first);
        assert_eq!(*taken.get_or_insert(memory.taken), memory.taken);
        // While these exist, there is no room for others.
        let refused = engine.copy_to_host(&all(&tensors), none).unwrap_err();
        assert!(matches!(refused, GpuError::Budget { .. }), "{refused}");
        drop(copies);
        assert_eq!(engine.frame_memory().idle, memory.taken);
    }
    // A smaller budget takes back memory that nobody needs.
    drop(engine.copy_to_host(&all(&tensors), none).unwrap());
    assert!(engine.frame_memory().idle > 1 << 16);
    engine.limit_frame_memory(1 << 16);
    assert_eq!((engine.frame_memory().taken, engine.frame_memory().idle), (0, 0));
    engine.limit_frame_memory(bytes + (64 << 10));
    // Idle memory makes room for frames and larger copies, and is given back.
    let mut few = engine.copy_to_host(&all(&tensors[..3]), none).unwrap();
    assert_eq!(few.values().unwrap().map(<[u8]>::len).sum::<usize>(), 4);
    drop(few);
    engine.trim_frame_memory();
    assert_eq!((engine.frame_memory().taken, engine.frame_memory().idle), (0, 0));
    let mut nothing = engine.copy_to_host(&[], none).unwrap();
    assert_eq!(nothing.values().unwrap().count(), 0);
    engine.limit_frame_memory(bytes / 2);
    let refused = engine.copy_to_host(&all(&tensors), none).unwrap_err();
    assert!(matches!(refused, GpuError::Budget { .. }), "{refused}");
    // Memory that is not a device's is not copied.
    // SAFETY: the engine finds out.
    let strange = unsafe { DeviceMemory::new(0, 4096, 64, 0) };
    let refused = engine.copy_to_host(&[strange], none).unwrap_err();
    assert!(matches!(refused, GpuError::Argument(_)), "{refused}");
}

/// Copies that a device makes first arrive later, as the values were at the call.
#[test]
fn copies_by_way_of_the_device_are_what_was_there() {
    let Some(gpu) = gpu() else { return };
    let mut tensors = tensors(&gpu);
    for (i, bytes) in [(40 << 20) + 3, 33 << 20].into_iter().enumerate() {
        let data: Vec<u8> = (0..bytes).map(|at: usize| (at * 29 + at / 512 + i) as u8).collect();
        let upload = gpu.upload(&data, 0);
        tensors.insert(5, (data, upload));
    }
    let bytes: u64 = tensors.iter().map(|t| t.0.len() as u64).sum();
    let engine = gpu.engine(CudaOptions { frames: bytes + (64 << 10), ..CudaOptions::default() });
    let check = |room: u64| {
        let room = BTreeMap::from([(0, room)]);
        let mut copies = engine.copy_to_host(&all(&tensors), &room).unwrap();
        for t in &tensors {
            overwrite(&gpu, &t.1, &vec![0xee; t.0.len()]);
        }
        for (i, (copy, t)) in copies.values().unwrap().zip(&tensors).enumerate() {
            assert!(copy == t.0, "tensor {i}, {room:?}");
        }
        for t in &tensors {
            overwrite(&gpu, &t.1, &t.0);
        }
        // Those that are dropped before they have arrived are waited for.
        drop(copies);
        drop(engine.copy_to_host(&all(&tensors), &room).unwrap());
    };
    // Nothing; all but the largest; a part of that, too; everything.
    for room in [0, bytes - (41 << 20), bytes - (10 << 20), bytes + (9 << 20), u64::MAX] {
        check(room);
    }
    if gpu.is_slow() {
        // Something else takes the room first.
        let rest = gpu.device.memory().unwrap().0 - (32 << 20);
        let _rest = gpu.pool.alloc(&gpu.stream, rest, "the rest").unwrap();
        check(bytes + (9 << 20));
    }
}

/// Writes on the stream that the originals are used on.
fn overwrite(gpu: &Gpu, upload: &Upload, bytes: &[u8]) {
    let pinned = Pinned::new(&gpu.device, bytes.len()).unwrap();
    // SAFETY: the legacy default stream; memory of the test's own, and the copy is waited for.
    unsafe {
        let stream = s4_codec_gpu::Stream::borrow(&gpu.device, 0);
        pinned.slice_mut(0, bytes.len()).copy_from_slice(bytes);
        stream.copy_to_device(&pinned, 0, bytes.len(), upload.address).unwrap();
        stream.synchronize().unwrap();
    }
}

#[test]
fn copies_are_encoded_to_the_frames_of_the_originals() {
    let Some(gpu) = gpu() else { return };
    let n = if gpu.is_slow() { 150_000 } else { 5_000_000 };
    let of = |dtype: DType, kind, n| {
        let data = patterns::all(kind, n).find(|p| p.0 == "like-weights").unwrap().1;
        Host::new(format!("{dtype} {n}"), dtype, data)
    };
    let hosts = [
        of(DType::BFloat16, Kind::BF16, n),
        of(DType::Float32, Kind::F32, n),
        of(DType::Float32, Kind::F32, 9),
    ];
    let uploads: Vec<_> = hosts.iter().map(|h| gpu.upload(&h.data, 0)).collect();
    let engine = gpu.engine(CudaOptions::default());
    let expected = on_gpu(&engine, &hosts, &uploads, None).unwrap();
    let memory: Vec<_> = uploads.iter().map(Upload::memory).collect();
    let copies = Stager::new(&gpu.cuda, 0).unwrap().copy(&memory, 0).unwrap();
    for upload in uploads {
        overwrite(&gpu, &upload, &vec![0; upload.bytes as usize]);
    }
    let tensors: Vec<_> = (hosts.iter().zip(copies.memory()))
        .map(|(h, &memory)| TensorValues::new(h.dtype, &h.shape, memory))
        .collect();
    let plans: Vec<_> = expected.iter().map(|e| e.plan.clone()).collect();
    let mut frames: Vec<Vec<Vec<u8>>> = hosts.iter().map(|_| vec![]).collect();
    engine
        .encode(&Jobs::<CudaError>::new(&tensors, &plans), |encoded| {
            for frame in encoded {
                frames[frame.tensor].push(frame.bytes.to_vec());
            }
            Ok(())
        })
        .unwrap();
    for ((host, e), own) in hosts.iter().zip(&expected).zip(frames) {
        assert!(e.chunks.iter().map(|c| &c.1).eq(own.iter()), "{}", host.name);
        assert!(on_cpu(host, Some(e.plan.clone())).chunks.iter().map(|c| &c.1).eq(own.iter()));
    }
}

#[test]
fn memory_that_is_to_stay_free_stays_free_and_the_rest_goes_back() {
    let Some(gpu) = gpu() else { return };
    let tensors = tensors(&gpu);
    let stager = Stager::new(&gpu.cuda, 0).unwrap();
    // Run once, so that the driver holds what it keeps.
    drop(stager.copy(&all(&tensors), 0).unwrap());
    let before = stager.memory().unwrap().0;
    let needed = stager.copy(&all(&tensors), 0).unwrap().bytes();
    assert_eq!(stager.memory().unwrap().0, before, "copies are left allocated");
    let e = stager.copy(&all(&tensors), before - needed + 1).unwrap_err();
    let GpuError::Budget { needed: n, budget, .. } = e else { panic!("{e}") };
    assert_eq!((n, budget), (needed, needed - 1));
    assert!(e.to_string().contains(&needed.to_string()), "{e}");
    assert!(stager.copy(&all(&tensors), u64::MAX).is_err());
    assert_eq!(stager.memory().unwrap().0, before);
    let copies = stager.copy(&all(&tensors), before - needed).unwrap();
    check(&gpu, &copies, &tensors);
    // Several at the same time, freed in any order.
    let more: Vec<_> = (0..3).map(|_| stager.copy(&all(&tensors), 0).unwrap()).collect();
    drop(copies);
    more.iter().for_each(|m| check(&gpu, m, &tensors));
    drop(more);
    assert_eq!(stager.memory().unwrap().0, before);
}

#[test]
fn what_is_no_memory_of_the_device_is_refused() {
    let Some(gpu) = gpu() else { return };
    let stager = Stager::new(&gpu.cuda, 0).unwrap();
    let host = [0u8; 64];
    // SAFETY: what is refused is not used.
    let foreign = unsafe { DeviceMemory::new(0, host.as_ptr() as u64, 64, 0) };
    let upload = gpu.upload(&[1; 1000], 0);
    // SAFETY: as above.
    let too_long = unsafe { DeviceMemory::new(0, upload.address, 1 << 40, 0) };
    // SAFETY: as above.
    let elsewhere = unsafe { DeviceMemory::new(1, upload.address, 1000, 0) };
    for bad in [foreign, too_long, elsewhere] {
        let e = stager.copy(&[upload.memory(), bad], 0).unwrap_err();
        assert!(matches!(e, GpuError::Argument(_)), "{e}");
    }
    assert!(matches!(Stager::new(&gpu.cuda, u32::MAX), Err(GpuError::Argument(_))));
}

#[test]
fn a_stream_of_its_own_comes_after_the_owners() {
    let Some(gpu) = gpu() else { return };
    let stager = Stager::new(&gpu.cuda, 0).unwrap();
    let host = Host::new("x", DType::Float32, vec![3; 400_000]);
    let upload = gpu.upload(&host.data, 0);
    // SAFETY: the legacy default stream is always there.
    let after = unsafe { stager.after(0).unwrap() };
    // SAFETY: the upload's own memory; the stager lives longer than what is done with it.
    let memory = unsafe { DeviceMemory::new(0, upload.address, upload.bytes, after) };
    let tensors = [TensorValues::new(host.dtype, &host.shape, memory)];
    let plans = [on_cpu(&host, None).plan];
    let mut bytes = 0;
    let engine = gpu.engine(CudaOptions::default());
    engine
        .encode(&Jobs::<CudaError>::new(&tensors, &plans), |frames| {
            for frame in frames {
                bytes += frame.bytes.len();
            }
            Ok(())
        })
        .unwrap();
    assert!(bytes > 0);
}

#[test]
fn each_device_has_its_own() {
    let Some(gpu) = gpu_of(1) else { return };
    let stager = Stager::new(&gpu.cuda, 1).unwrap();
    let upload = gpu.upload(&[7; 5000], 0);
    let copies = stager.copy(&[upload.memory()], 0).unwrap();
    assert_eq!(copies.memory()[0].ordinal(), 1);
    assert_eq!(gpu.download(copies.memory()[0].address(), 5000), [7; 5000]);
}
