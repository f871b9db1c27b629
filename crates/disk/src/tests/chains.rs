//! Backing chains: every byte as `qemu-img convert` gives it, and the refusals.

use ringdisk_qcow2::Bytes;
use std::fs;
use std::path::Path;
use std::time::Instant;

use tempfile::TempDir;

use super::{assert_same, directory, open, qemu_img, qemu_io, read_steps, reading, refusal, run};
use crate::{Cache, Cause, ErrorKind, Format, ImageOptions, LAYERS_MAX};

/// Compares an image with what `qemu-img convert` makes of it, in requests of several sizes.
fn compare(directory: &TempDir, image: &str, options: &ImageOptions) {
    let raw = "compare.raw";
    qemu_img(directory, &["convert", "-O", "raw", image, raw]);
    let expected = fs::read(directory.path().join(raw)).expect("read");
    run(async |ring| {
        let path = directory.path().join(image);
        let disk = open(&ring, path, options).await.expect("open");
        for step in [1 << 20, 65536, 12_345] {
            assert_same(&read_steps(&ring, &disk, step).await, &expected);
        }
    });
}

/// Overlay `name` of `size` over `backing`.
fn overlay(
    directory: &TempDir,
    name: &str,
    backing: &str,
    format: &str,
    size: &str,
    more: &[&str],
) {
    let mut arguments = vec!["create", "-q", "-f", "qcow2", "-b", backing, "-F", format];
    arguments.extend_from_slice(more);
    arguments.extend_from_slice(&[name, size]);
    qemu_img(directory, &arguments);
}

/// `top.qcow2` (extended L2, zstd) over `mid.qcow2` (1 KiB clusters) over `base.qcow2` over
/// `base.raw`; each layer of another size, with data, zeroes, compressed data, holes.
fn mixed(directory: &TempDir) {
    qemu_img(directory, &["create", "-q", "-f", "raw", "base.raw", "5000k"]);
    qemu_io(directory, "raw", "base.raw", &["write -P 1 0 5000k", "write -z -u 1M 512k"]);
    overlay(directory, "base.qcow2", "base.raw", "raw", "8M", &[]);
    qemu_io(
        directory,
        "qcow2",
        "base.qcow2",
        &["write -P 2 100k 300k", "write -P 3 6M 64k", "write -c -P 4 2M 256k"],
    );
    let small = ["-o", "cluster_size=1k"];
    overlay(directory, "mid.qcow2", "base.qcow2", "qcow2", "3M", &small);
    qemu_io(
        directory,
        "qcow2",
        "mid.qcow2",
        &["write -P 5 111k 7k", "write -P 6 120k 1k", "write -z 1900k 300k"],
    );
    let modern = ["-o", "extended_l2=on,compression_type=zstd,cluster_size=128k"];
    overlay(directory, "top.qcow2", "mid.qcow2", "qcow2", "10M", &modern);
    qemu_io(
        directory,
        "qcow2",
        "top.qcow2",
        &[
            "write -P 7 4k 4k",
            "write -P 8 12k 4k",
            "write -c -P 9 256k 128k",
            "write -z 400k 40k",
            "write -P 10 9M 100k",
        ],
    );
}

#[test]
fn a_mixed_chain_is_equal_to_convert() {
    let directory = directory();
    mixed(&directory);
    for image in ["base.qcow2", "mid.qcow2", "top.qcow2"] {
        compare(&directory, image, &reading());
    }
}

#[test]
fn every_cache_mode_reads_a_chain() {
    let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("directory");
    mixed(&directory);
    for cache in [Cache::None, Cache::Writethrough, Cache::DirectSync, Cache::Unsafe] {
        compare(&directory, "top.qcow2", &ImageOptions { cache, ..reading() });
    }
}

#[test]
fn a_short_layer_hides_what_is_below_its_end() {
    let directory = directory();
    qemu_img(&directory, &["create", "-q", "-f", "raw", "base.raw", "1M"]);
    qemu_io(&directory, "raw", "base.raw", &["write -P 1 0 1M"]);
    overlay(&directory, "mid.qcow2", "base.raw", "raw", "300k", &[]);
    overlay(&directory, "top.qcow2", "mid.qcow2", "qcow2", "1M", &[]);
    compare(&directory, "top.qcow2", &reading());
}

#[test]
fn many_small_runs_in_one_request_are_put_together() {
    let directory = directory();
    qemu_img(&directory, &["create", "-q", "-f", "raw", "base.raw", "1M"]);
    qemu_io(&directory, "raw", "base.raw", &["write -P 1 0 1M"]);
    let small = ["-o", "cluster_size=512"];
    overlay(&directory, "top.qcow2", "base.raw", "raw", "1M", &small);
    let commands: Vec<String> = (0..200)
        .map(|index| format!("write -P {} {} 512", index % 251 + 2, index * 1536))
        .collect();
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    qemu_io(&directory, "qcow2", "top.qcow2", &commands);
    compare(&directory, "top.qcow2", &reading());
}

#[test]
fn names_are_relative_to_the_image_that_names_them() {
    let directory = directory();
    fs::create_dir_all(directory.path().join("a/b")).expect("mkdir");
    qemu_img(&directory, &["create", "-q", "-f", "raw", "a/b/base.raw", "1M"]);
    qemu_io(&directory, "raw", "a/b/base.raw", &["write -P 1 0 1M"]);
    overlay(&directory, "a/b/mid.qcow2", "base.raw", "raw", "1M", &[]);
    overlay(&directory, "a/mid.qcow2", "b/mid.qcow2", "qcow2", "1M", &[]);
    overlay(&directory, "top.qcow2", "file:a/mid.qcow2", "qcow2", "1M", &[]);
    run(async |ring| {
        let path = directory.path().join("top.qcow2");
        let disk = open(&ring, path, &reading()).await.expect("open");
        let layers = disk.layers();
        let names: Vec<&Path> = layers.iter().map(|layer| layer.name()).collect();
        let expected = ["top.qcow2", "a/mid.qcow2", "a/b/mid.qcow2", "a/b/base.raw"];
        for (name, expected) in names.iter().zip(expected) {
            assert_eq!(*name, directory.path().join(expected));
        }
        assert_same(&read_steps(&ring, &disk, 65536).await, &vec![1; 1 << 20]);
    });
    // `a/mid.qcow2` may not name what is above its own directory, unless that is allowed.
    overlay(&directory, "a/b/up.qcow2", "../../top.qcow2", "qcow2", "1M", &[]);
    let path = directory.path().join("a/b/up.qcow2");
    let error = refusal(&path, &reading());
    assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
    assert!(error.message().contains("--allow-path"), "{error}");
    assert!(error.message().contains("up.qcow2"), "{error}");
    let allow_paths = vec![directory.path().to_path_buf()];
    run(async |ring| {
        let options = ImageOptions { allow_paths, ..reading() };
        let disk = open(&ring, path, &options).await.expect("allowed");
        assert_eq!(disk.layers().len(), 5);
    });
}

#[test]
fn json_names_open_plain_files() {
    let directory = directory();
    mixed(&directory);
    let cases = [
        r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"mid.qcow2"}}"#,
        r#"json:{"driver":"qcow2","file.filename":"mid.qcow2"}"#,
        r#"json:{"file.driver":"file","file.filename":"mid.qcow2","driver":"qcow2"}"#,
    ];
    for name in cases {
        qemu_img(&directory, &["rebase", "-u", "-b", name, "-F", "qcow2", "top.qcow2"]);
        // QEMU reads such a name relative to where it runs, which is this directory.
        compare(&directory, "top.qcow2", &reading());
        run(async |ring| {
            let path = directory.path().join("top.qcow2");
            let disk = open(&ring, path, &reading()).await.expect("open");
            assert_eq!(disk.layers()[0].full_backing_name(), Some(name));
            assert_eq!(disk.layers()[1].name(), directory.path().join("mid.qcow2"));
        });
    }
}

#[test]
fn a_json_name_states_the_format_where_the_header_does_not() {
    let directory = directory();
    mixed(&directory);
    let name = r#"json:{"driver":"qcow2","file.filename":"mid.qcow2"}"#;
    rebase_without_format(&directory, "top.qcow2", name);
    compare(&directory, "top.qcow2", &reading());
    let name = r#"json:{"driver":"raw","offset":1024,"size":2048,"file.filename":"base.raw"}"#;
    rebase_without_format(&directory, "top.qcow2", name);
    run(async |ring| {
        let path = directory.path().join("top.qcow2");
        let disk = open(&ring, path, &reading()).await.expect("open");
        assert_eq!(disk.layers()[1].size(), Bytes(2048));
        assert_eq!(disk.layers()[1].format(), Some(Format::Raw));
    });
}

/// Sets a backing file and takes the format extension out of the header, as old tools wrote it.
fn rebase_without_format(directory: &TempDir, image: &str, name: &str) {
    qemu_img(directory, &["rebase", "-u", "-b", name, "-F", "qcow2", image]);
    let path = directory.path().join(image);
    let mut bytes = fs::read(&path).expect("read");
    let kind = 0xe279_2aca_u32.to_be_bytes();
    let head = &bytes[..4096];
    let at = head.windows(4).position(|window| window == kind).expect("extension");
    // An unknown extension is ignored.
    bytes[at..at + 4].copy_from_slice(&0x1234_5678_u32.to_be_bytes());
    fs::write(&path, bytes).expect("write");
}

#[test]
fn the_format_of_a_backing_file_is_never_guessed() {
    let directory = directory();
    mixed(&directory);
    rebase_without_format(&directory, "top.qcow2", "mid.qcow2");
    let error = refusal(directory.path().join("top.qcow2"), &reading());
    assert_eq!(error.kind(), ErrorKind::UnknownFormat, "{error}");
    for part in ["mid.qcow2", "top.qcow2", "ringdisk rebase", "-F"] {
        assert!(error.message().contains(part), "{error}");
    }
    // A raw base that holds qcow2 is served as its bytes: the guest cannot choose.
    qemu_img(&directory, &["rebase", "-u", "-b", "mid.qcow2", "-F", "raw", "top.qcow2"]);
    compare(&directory, "top.qcow2", &reading());
}

#[test]
fn backing_formats_and_protocols_that_are_not_ours_are_refused() {
    let directory = directory();
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "top.qcow2", "1M"]);
    let path = directory.path().join("top.qcow2");
    let cases = [
        ("base", "vmdk", ErrorKind::UnknownFormat, "vmdk"),
        ("nbd://localhost/x", "raw", ErrorKind::NotAllowed, "--allow-host localhost"),
        ("https://host/x", "qcow2", ErrorKind::Unsupported, "'https:'"),
        ("json:{\"driver\":\"raw\",\"file.filename\":\"x\"}", "qcow2", ErrorKind::Invalid, "raw"),
        ("nothing.raw", "raw", ErrorKind::NotFound, "nothing.raw"),
        (".", "raw", ErrorKind::NotAnImage, "directory"),
        ("/etc/passwd", "raw", ErrorKind::NotAllowed, "--allow-path"),
        ("/dev/null", "raw", ErrorKind::NotAllowed, "--allow-path"),
        ("../../../../../../etc/passwd", "raw", ErrorKind::NotAllowed, "--allow-path"),
    ];
    for (name, format, kind, part) in cases {
        qemu_img(&directory, &["rebase", "-u", "-b", name, "-F", format, "top.qcow2"]);
        let error = refusal(&path, &reading());
        assert_eq!(error.kind(), kind, "{name}: {error}");
        assert!(error.message().contains(part), "{error}");
        assert!(error.message().contains("top.qcow2"), "{error}");
    }
}

#[test]
fn loops_are_refused() {
    let directory = directory();
    for name in ["a", "b", "c"] {
        qemu_img(&directory, &["create", "-q", "-f", "qcow2", name, "1M"]);
    }
    let rebase = |image: &str, name: &str| {
        qemu_img(&directory, &["rebase", "-u", "-b", name, "-F", "qcow2", image]);
    };
    rebase("a", "b");
    rebase("b", "c");
    rebase("c", "b");
    fs::hard_link(directory.path().join("a"), directory.path().join("hard")).expect("link");
    let error = refusal(directory.path().join("a"), &reading());
    assert_eq!(error.kind(), ErrorKind::Loop, "{error}");
    assert!(error.message().contains("loop"), "{error}");
    assert!(matches!(error.cause(), Some(Cause::BackingLoop { .. })), "{error:?}");
    rebase("c", "hard");
    assert_eq!(refusal(directory.path().join("a"), &reading()).kind(), ErrorKind::Loop);
    rebase("a", "a");
    assert_eq!(refusal(directory.path().join("a"), &reading()).kind(), ErrorKind::Loop);
}

/// Overlays `001` … `count` over the raw file `000`; layer `n` has cluster `n`, filled with `n`.
fn deep(directory: &TempDir, count: usize) {
    const CLUSTER: usize = 4096;
    let size = CLUSTER * (count + 2);
    fs::write(directory.path().join("000"), vec![0xff; size]).expect("write");
    // All layers are copies of one, with another name and another cluster filled in: quicker than
    // 200 runs of two programs.
    let clusters = ["-o", "cluster_size=4k"];
    overlay(directory, "template", "000", "raw", &size.to_string(), &clusters);
    qemu_io(directory, "qcow2", "template", &["write 4096 4096"]);
    qemu_img(directory, &["rebase", "-u", "-b", "000", "-F", "qcow2", "template"]);
    let template = fs::read(directory.path().join("template")).expect("read");
    let name_at = number_at(&template, 8);
    let l2 = number_at(&template, number_at(&template, 40));
    let data = number_at(&template, l2 + 8);
    let entry = template[l2 + 8..l2 + 16].to_vec();
    for layer in 1..=count {
        let mut image = template.clone();
        image[name_at..name_at + 3].copy_from_slice(format!("{:03}", layer - 1).as_bytes());
        image[l2 + 8..l2 + 16].fill(0);
        image[l2 + 8 * layer..l2 + 8 * layer + 8].copy_from_slice(&entry);
        image[data..data + CLUSTER].fill(u8::try_from(layer % 256).expect("byte"));
        fs::write(directory.path().join(format!("{layer:03}")), image).expect("write");
    }
    qemu_img(directory, &["rebase", "-u", "-b", "000", "-F", "raw", "001"]);
}

/// A big-endian number of a header or table, without flags.
fn number_at(bytes: &[u8], at: usize) -> usize {
    let bytes: [u8; 8] = bytes[at..at + 8].try_into().expect("number");
    usize::try_from(u64::from_be_bytes(bytes) & 0x00ff_ffff_ffff_ffff).expect("offset")
}

#[test]
fn a_chain_of_200_files_opens_and_reads_on_a_small_stack() {
    let directory = directory();
    deep(&directory, 200);
    let path = directory.path().join("200");
    let small = std::thread::Builder::new().stack_size(256 << 10);
    let thread = small.spawn(move || {
        run(async |ring| {
            let before = Instant::now();
            let disk = open(&ring, path, &reading()).await.expect("open");
            assert!(before.elapsed().as_secs() < 10);
            assert_eq!(disk.layers().len(), 201);
            let bytes = read_steps(&ring, &disk, 1 << 20).await;
            let mut expected = vec![0xff; bytes.len()];
            for layer in 1..=200 {
                let number = u8::try_from(layer).expect("byte");
                expected[4096 * layer..4096 * (layer + 1)].fill(number);
            }
            assert_same(&bytes, &expected);
        });
    });
    thread.expect("thread").join().expect("chain");
}

#[test]
fn a_chain_that_is_too_deep_is_refused() {
    let directory = directory();
    deep(&directory, LAYERS_MAX);
    run(async |ring| {
        let longest = directory.path().join(format!("{:03}", LAYERS_MAX - 1));
        let disk = open(&ring, longest, &reading()).await.expect("open");
        assert_eq!(disk.layers().len(), LAYERS_MAX);
    });
    let error = refusal(directory.path().join(format!("{LAYERS_MAX:03}")), &reading());
    assert_eq!(error.kind(), ErrorKind::TooDeep, "{error}");
    assert!(error.message().contains("256"), "{error}");
    assert!(error.message().contains("ringdisk commit"), "{error}");
}

#[test]
fn external_data_files_are_read() {
    for raw in ["on", "off"] {
        let directory = directory();
        let options = format!("data_file=data.bin,data_file_raw={raw}");
        qemu_img(&directory, &["create", "-q", "-f", "qcow2", "-o", &options, "a.qcow2", "4M"]);
        qemu_io(
            &directory,
            "qcow2",
            "a.qcow2",
            &["write -P 1 1M 1M", "write -P 2 3M 64k", "write -z 1200k 64k"],
        );
        compare(&directory, "a.qcow2", &reading());
        overlay(&directory, "top.qcow2", "a.qcow2", "qcow2", "5M", &[]);
        compare(&directory, "top.qcow2", &reading());
        let error = {
            fs::rename(directory.path().join("data.bin"), directory.path().join("gone"))
                .expect("rename");
            refusal(directory.path().join("a.qcow2"), &reading())
        };
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert!(error.message().contains("data file 'data.bin' of"), "{error}");
    }
}

#[test]
fn a_data_file_outside_is_refused_unless_allowed() {
    let inside = directory();
    let outside = directory();
    let data = outside.path().join("data.bin");
    let options = format!("data_file={}", data.to_str().expect("text"));
    qemu_img(&inside, &["create", "-q", "-f", "qcow2", "-o", &options, "a.qcow2", "1M"]);
    let path = inside.path().join("a.qcow2");
    let error = refusal(&path, &reading());
    assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
    assert!(error.message().contains("--allow-path"), "{error}");
    for allowed in [outside.path().to_path_buf(), data] {
        let options = ImageOptions { allow_paths: vec![allowed], ..reading() };
        compare(&inside, "a.qcow2", &options);
    }
}

#[test]
fn a_data_file_that_is_the_image_is_refused() {
    let directory = directory();
    let options = "data_file=data.bin";
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "-o", options, "a.qcow2", "1M"]);
    fs::remove_file(directory.path().join("data.bin")).expect("remove");
    fs::hard_link(directory.path().join("a.qcow2"), directory.path().join("data.bin"))
        .expect("link");
    let error = refusal(directory.path().join("a.qcow2"), &reading());
    assert_eq!(error.kind(), ErrorKind::Loop, "{error}");
}

#[test]
fn an_inherited_descriptor_needs_a_directory_for_its_backing_file() {
    let directory = directory();
    mixed(&directory);
    let source = || {
        let file = fs::File::open(directory.path().join("top.qcow2")).expect("open");
        crate::Source::Fd(file.into(), "fd 5".to_owned())
    };
    run(async |ring| {
        let error = crate::Disk::open(&ring, source(), &reading()).await.expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
        assert!(error.message().contains("--allow-path"), "{error}");
        let allow_paths = vec![directory.path().to_path_buf()];
        let options = ImageOptions { allow_paths, ..reading() };
        let disk = crate::Disk::open(&ring, source(), &options).await.expect("open");
        assert_eq!(disk.layers().len(), 4);
    });
}

#[test]
fn threads_read_one_disk_with_a_small_cache_at_once() {
    let directory = directory();
    mixed(&directory);
    qemu_img(&directory, &["convert", "-O", "raw", "top.qcow2", "expected.raw"]);
    let expected = fs::read(directory.path().join("expected.raw")).expect("read");
    let path = directory.path().join("top.qcow2");
    let options = ImageOptions { metadata_cache_bytes: Some(Bytes(64 << 10)), ..reading() };
    let disk = run(async |ring| open(&ring, path, &options).await.expect("open"));
    std::thread::scope(|scope| {
        for step in [4096, 50_000, 1 << 20] {
            let (disk, expected) = (&disk, &expected);
            scope.spawn(move || {
                run(async |ring| {
                    assert_same(&read_steps(&ring, disk, step).await, expected);
                });
            });
        }
    });
}
