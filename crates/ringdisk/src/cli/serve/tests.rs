use clap::Parser;
use clap::error::ErrorKind;
use ringdisk_disk::{Cache, Format};
use ringdisk_export::Threads;
use ringdisk_vhost::export::{OnError, Packed, Second};

use super::*;
use crate::cli::{Cli, Command};

fn serve(words: &[&str]) -> Result<ServeArgs, clap::Error> {
    match Cli::try_parse_from(["ringdisk", "serve"].iter().chain(words))?.command {
        Command::Serve(args) => Ok(*args),
        other => panic!("not serve: {other:?}"),
    }
}

fn disks(words: &str) -> Result<Vec<ServedDisk>, clap::Error> {
    serve(&words.split_whitespace().collect::<Vec<_>>())?.disks()
}

fn path(text: &str) -> Option<PathBuf> {
    Some(PathBuf::from(text))
}

#[test]
fn one_disk_has_the_options_of_the_command_line() {
    let all = disks(
        "disk.img -f raw --direct --vhost-user-blk s --queues 4 --queue-size 128 --threads 2 \
         --cpus 0-1 --numa off \
         --serial root --logical-block-size 4k --physical-block-size 64k --packed off \
         --pin-guest-memory --on-error stop \
         --second-front-end refuse --socket-mode 660 --socket-group kvm",
    )
    .expect("parses");
    let [disk] = all.as_slice() else { panic!("{all:?}") };
    assert_eq!(disk.image, path("disk.img"));
    assert_eq!(disk.args.source.cache_mode(), Cache::None);
    let DeviceArgs { queues, queue_size, threads, serial, packed, on_error, .. } =
        &disk.args.device;
    assert_eq!((*queues, *queue_size, threads.threads), (Some(4), 128, Threads::Count(2)));
    assert_eq!((serial.as_str(), *packed, *on_error), ("root", Packed::Off, OnError::Stop));
    assert_eq!(disk.args.device.logical_block_size, 4096);
    assert_eq!(disk.args.device.physical_block_size, Some(65536));
    let SocketArgs { vhost_user_blk, socket_mode, second_front_end, .. } = &disk.args.place;
    assert_eq!((vhost_user_blk, *socket_mode), (&path("s"), Some(0o660)));
    assert_eq!(*second_front_end, Second::Refuse);
}

#[test]
fn defaults_are_those_of_the_help_text() {
    let disk = disks("disk.img").expect("parses").remove(0);
    assert_eq!(disk.args.source.cache_mode(), Cache::Writeback);
    assert_eq!((disk.args.device.queues, disk.args.device.queue_size), (None, 1024));
    assert_eq!((disk.args.device.logical_block_size, disk.args.device.packed), (512, Packed::Auto));
    assert_eq!(disk.args.place.vhost_user_blk, None);
}

#[test]
fn disks_have_their_own_options_and_those_of_all() {
    let all = disks(
        "--cache none --queues 4 -f qcow2 --allow-path /x --read-only \
         --disk image=a,socket=a.sock,serial=one \
         --disk \
         image=b,,c,connect=b.sock,cache=unsafe,format=raw,read-only=off,allow-path=/y,\
         allow-path=/z,lazy-refcounts \
         --disk null=1G,read-zeroes,socket-fd=5,queues=1",
    )
    .expect("parses");
    let [a, b, null] = all.as_slice() else { panic!("{all:?}") };
    assert_eq!((&a.image, a.args.place.vhost_user_blk.clone()), (&path("a"), path("a.sock")));
    assert_eq!((a.args.source.cache, a.args.source.format), (Cache::None, Some(Format::Qcow2)));
    assert_eq!((a.args.device.queues, a.args.device.serial.as_str()), (Some(4), "one"));
    assert!(a.args.source.read_only && a.args.source.allow_path == [PathBuf::from("/x")]);
    assert_eq!((&b.image, b.args.place.connect.clone()), (&path("b,c"), path("b.sock")));
    assert_eq!((b.args.source.cache, b.args.source.format), (Cache::Unsafe, Some(Format::Raw)));
    assert!(!b.args.source.read_only);
    assert_eq!(b.args.source.allow_path, [PathBuf::from("/y"), PathBuf::from("/z")]);
    assert_eq!(b.args.source.lazy_refcounts, Some(true));
    // What a null disk cannot have is not for it.
    assert_eq!((null.image.clone(), null.args.source.null), (None, Some(1 << 30)));
    assert_eq!((null.args.place.socket_fd, null.args.device.queues), (Some(5), Some(1)));
    assert!(null.args.source.read_zeroes && null.args.source.read_only);
}

#[test]
fn words_that_make_no_sense_are_refused() {
    for (words, kind, text) in [
        ("", ErrorKind::MissingRequiredArgument, "the IMAGE is missing"),
        ("--null 1G disk.img", ErrorKind::ArgumentConflict, "cannot be used with"),
        ("a b", ErrorKind::UnknownArgument, "unexpected argument"),
        ("a --vhost-user-blk s --connect t", ErrorKind::ArgumentConflict, "cannot be used with"),
        ("a --vhost-user-blk s --socket-fd 5", ErrorKind::ArgumentConflict, "cannot be used with"),
        (
            "a --connect s --second-front-end wait",
            ErrorKind::ArgumentConflict,
            "cannot be used with",
        ),
        ("a --connect s --socket-mode 600", ErrorKind::ArgumentConflict, "cannot be used with"),
        ("a --socket-fd 2", ErrorKind::ValueValidation, "3..="),
        ("a --socket-mode 466 --vhost-user-blk s", ErrorKind::ValueValidation, "octal mode"),
        ("a --socket-mode 8 --vhost-user-blk s", ErrorKind::ValueValidation, "octal mode"),
        ("a --queues 0", ErrorKind::ValueValidation, "1..=64"),
        ("a --queues 65", ErrorKind::ValueValidation, "1..=64"),
        ("a --queue-size 2048", ErrorKind::ValueValidation, "2..=1024"),
        ("a --threads 65", ErrorKind::ValueValidation, "from 1 to 64"),
        ("a --serial 123456789012345678901", ErrorKind::ValueValidation, "20 is the most"),
        ("a --logical-block-size 1000", ErrorKind::ValueValidation, "power of two"),
        ("a --logical-block-size 4M", ErrorKind::ValueValidation, "power of two"),
        (
            "a --logical-block-size 4k --physical-block-size 512",
            ErrorKind::ValueValidation,
            "smaller",
        ),
        ("a --packed maybe", ErrorKind::InvalidValue, "auto, on, off"),
        ("a --on-error ignore", ErrorKind::InvalidValue, "report, stop"),
        ("a --incoming --read-only", ErrorKind::ArgumentConflict, "cannot be used with"),
        ("a --incoming --upgrade", ErrorKind::ArgumentConflict, "cannot be used with"),
        ("a --snapshot --read-only", ErrorKind::ArgumentConflict, "cannot be used with"),
        ("a --disk image=b", ErrorKind::ArgumentConflict, "cannot be used with"),
        ("--serial x --disk image=b", ErrorKind::ArgumentConflict, "cannot be used with"),
        (
            "--disk socket=s",
            ErrorKind::MissingRequiredArgument,
            "the image of --disk 'socket=s' is missing",
        ),
        (
            "--disk image=b,sokcet=s",
            ErrorKind::UnknownArgument,
            "no key 'sokcet'; known are socket, image,",
        ),
        (
            "--disk image=b,cache=sync",
            ErrorKind::InvalidValue,
            "in --disk 'image=b,cache=sync': invalid value 'sync'",
        ),
        ("--disk image=b,queues", ErrorKind::InvalidValue, "a value is missing: queues=..."),
        ("--disk image=b,read-only=yes", ErrorKind::InvalidValue, "read-only=on or read-only=off"),
        ("--disk image=b,image=c", ErrorKind::ArgumentConflict, "'image' is there twice"),
        ("--disk image=b,null=1G", ErrorKind::ArgumentConflict, "cannot be used with"),
        ("--disk image=b,", ErrorKind::UnknownArgument, "there is no key ''"),
        (
            "--disk image=b,socket=s --disk image=c,socket=./s",
            ErrorKind::ArgumentConflict,
            "one socket",
        ),
        (
            "--disk image=b,socket-fd=4 --disk image=c,socket-fd=4",
            ErrorKind::ArgumentConflict,
            "one socket",
        ),
    ] {
        let error = disks(words).expect_err(words);
        assert_eq!(error.kind(), kind, "{words}: {error}");
        assert!(error.to_string().contains(text), "{words}: {error}");
        assert_eq!(error.exit_code(), 2, "{words}");
    }
}

#[test]
fn words_about_the_kernel_that_contradict_each_other_are_refused() {
    let cases = [
        ("--accel require --packed on", ["--accel require", "--packed on"]),
        ("--accel off --accel-workers 1", ["--accel off", "--accel-workers"]),
        ("--accel off --accel-engine kiocb", ["--accel off", "--accel-engine"]),
        ("--queues 2 --accel-workers 3", ["--accel-workers 3", "--queues 2"]),
        ("--queues 1 --accel require --accel-workers 2", ["--accel-workers 2", "--queues 1"]),
    ];
    for (words, named) in cases {
        let one = format!("disk.img --vhost-user-blk s {words}");
        let spec = words.replace(" --", ",").replace("--", "").replace(' ', "=");
        let several = format!("--disk image=a,socket=s --disk image=b,socket=t,{spec}");
        for line in [one, several] {
            let refused = disks(&line).expect_err(&line);
            assert_eq!(refused.exit_code(), 2, "{line}");
            let text = refused.to_string();
            assert!(named.iter().all(|word| text.contains(word)), "{line}: {text}");
        }
    }
    for words in [
        "--accel auto --packed on",
        "--accel off --packed on",
        "--accel require --packed off",
        "--queues 2 --accel-workers 2 --accel-engine bio",
        "--accel off --accel-engine auto",
    ] {
        disks(&format!("disk.img --vhost-user-blk s {words}")).expect(words);
    }
}
