use super::*;

fn parsed(words: &[&str]) -> Result<Invocation, UsageError> {
    parse("/usr/bin/qemu-nbd", words.iter().map(OsString::from))
}

fn serve(words: &[&str]) -> Serve {
    match parsed(words).expect("good words") {
        Invocation::Serve(serve) => *serve,
        other => panic!("{other:?}"),
    }
}

fn error(words: &[&str]) -> String {
    parsed(words).expect_err("bad words").to_string()
}

#[test]
fn defaults_are_those_of_qemu_nbd() {
    let serve = serve(&["disk"]);
    assert_eq!(serve.listen, Listen::Tcp(Address { host: HOST.into(), port: PORT.into() }));
    assert_eq!((serve.shared, serve.persistent, serve.name.as_str()), (1, false, ""));
    assert_eq!(serve.handshake_limit_s, 10);
    assert_eq!(serve.images.cache, Cache::Writeback);
    assert_eq!(serve.images.discard, Discard::Ignore);
    assert!(!serve.read_only && !serve.fork && serve.device.is_none());
}

/// The command lines of programs that start `qemu-nbd` (facts: callers).
#[test]
fn callers_are_understood() {
    let virt_v2v = serve(&[
        "-t",
        "--shared=0",
        "--discard=unmap",
        "--pid-file",
        "/run/p",
        "--socket",
        "/run/s",
        "-s",
        "--selinux-label",
        "l",
        "--format",
        "qcow2",
        "disk",
    ]);
    assert_eq!((virt_v2v.shared, virt_v2v.images.discard), (0, Discard::Unmap));
    assert!(virt_v2v.images.temporary && virt_v2v.persistent);
    assert_eq!(virt_v2v.selinux_label.as_deref(), Some("l"));

    let virtnbdbackup = serve(&[
        "-r",
        "--format=qcow2",
        "-x",
        "sda",
        "disk",
        "-k",
        "/run/s",
        "-t",
        "-e 2",
        "--fork",
        "--detect-zeroes=on",
        "--pid-file=/run/p",
        "--bitmap=virtnbdbackup.0",
    ]);
    assert_eq!((virtnbdbackup.shared, virtnbdbackup.name.as_str()), (2, "sda"));
    assert_eq!(virtnbdbackup.bitmaps, ["virtnbdbackup.0"]);
    // Where it has no bitmap it says a bare `--`.
    assert!(serve(&["-r", "disk", "--fork", "--"]).bitmaps.is_empty());

    let imageio = serve(&[
        "--export-name=",
        "--persistent",
        "--shared=8",
        "--socket=/run/s",
        "--read-only",
        "--cache=none",
        "--aio=native",
        "--discard=unmap",
        "--detect-zeroes=unmap",
        "--allocation-depth",
        "json:{\"driver\":\"qcow2\"}",
    ]);
    assert_eq!((imageio.images.cache, imageio.images.aio), (Cache::None, Aio::Native));
    assert_eq!(imageio.images.detect_zeroes, DetectZeroes::Unmap);
    assert!(imageio.allocation_depth);

    let incus = serve(&["--socket=/s", "--bitmap=a", "--bitmap=b", "disk"]);
    assert_eq!(incus.bitmaps, ["a", "b"]);
    let device = serve(&["--connect=/dev/nbd0", "--discard=unmap", "--format=raw", "disk"]);
    assert_eq!(device.device, Some(PathBuf::from("/dev/nbd0")));
    let gone = parsed(&["--disconnect", "/dev/nbd0"]);
    assert_eq!(gone, Ok(Invocation::Disconnect("/dev/nbd0".into())));
}

#[test]
fn a_socket_is_taken_before_a_port() {
    let serve = serve(&["-p", "7", "-k", "/run/s", "-b", "localhost", "disk"]);
    assert_eq!(serve.listen, Listen::Unix("/run/s".into()));
}

#[test]
fn wrong_words_have_the_texts_of_qemu_nbd() {
    let usage = "Try `/usr/bin/qemu-nbd --help' for more information.";
    let number = format!("qemu-nbd: Invalid number of arguments\n{usage}");
    for words in [&[][..], &["a", "b"], &["-d"], &["-e", "2"]] {
        assert_eq!(error(words), number, "{words:?}");
    }
    assert_eq!(
        error(&["--foo"]),
        format!("/usr/bin/qemu-nbd: unrecognized option '--foo'\nqemu-nbd: {usage}")
    );
    for (words, text) in [
        (&["-e", "x", "disk"][..], "Invalid shared device number 'x'"),
        (&["-e", "-1", "disk"], "Invalid shared device number '-1'"),
        (&["-e", "2x", "disk"], "Invalid shared device number '2x'"),
        (&["-e", "", "disk"], "Invalid shared device number ''"),
        (&["-o", "1G", "disk"], "Invalid offset '1G'"),
        (&["-o", "- 5", "disk"], "Invalid offset '- 5'"),
        (&["-o", "18446744073709551616", "disk"], "Invalid offset '18446744073709551616'"),
        (&["-o", " -5", "disk"], "Value '-5' is out of range for parameter 'offset'"),
        (
            &["-o", "9223372036854775808", "disk"],
            "Value '-9223372036854775808' is out of range for parameter 'offset'",
        ),
        (&["--handshake-limit=-1", "disk"], "Invalid handshake limit '-1'"),
        (&["--cache=bad", "disk"], "Invalid cache mode `bad'"),
        (&["--aio=bad", "disk"], "Invalid aio mode 'bad'"),
        (&["--discard=bad", "disk"], "Invalid discard mode `bad'"),
        (
            &["--detect-zeroes=bad", "disk"],
            "Failed to parse detect_zeroes mode: invalid parameter value: bad",
        ),
        (&["-n", "--cache=none", "disk"], "-n and --cache can only be specified once"),
        (&["--cache=none", "-n", "disk"], "-n and --cache can only be specified once"),
        (&["--aio=native", "--aio=native", "d"], "--aio can only be specified once"),
        (&["--discard=on", "--discard=on", "d"], "--discard can only be specified once"),
        (
            &["--detect-zeroes=unmap", "disk"],
            "setting detect-zeroes to unmap is not allowed without setting discard operation to \
             unmap",
        ),
        (&["-k", "rel", "disk"], "socket path must be absolute"),
        (&["--tls-authz=a", "disk"], "--tls-authz is not permitted without --tls-creds"),
        (&["--tls-hostname=a", "disk"], "--tls-hostname is not permitted without --tls-creds"),
        (&["--image-opts", "-f", "raw", "d"], "--image-opts and -f are mutually exclusive"),
        (&["-L", "disk"], "List mode is incompatible with a file name"),
        (&["-L", "-x", "a"], "List mode is incompatible with per-device settings"),
        (&["-L", "-c", "/dev/nbd0"], "List mode is incompatible with per-device settings"),
        (&["-L", "-f", "raw"], "List mode is incompatible with per-device settings"),
        (&["-L", "-l", "s"], "List mode is incompatible with per-device settings"),
        (&["-L", "-n"], "List mode is incompatible with per-device settings"),
        (&["-L", "--aio=threads"], "List mode is incompatible with per-device settings"),
        (&["-L", "--discard=unmap"], "List mode is incompatible with per-device settings"),
        (&["-L", "--fork"], "List mode is incompatible with forking"),
        (
            &["-l", "snapshot.foo=1", "d"],
            "Invalid parameter 'snapshot.foo'\n\
             qemu-nbd: Failed in parsing snapshot param `snapshot.foo=1'",
        ),
    ] {
        assert_eq!(error(words), format!("qemu-nbd: {text}"), "{words:?}");
    }
}

#[test]
fn of_several_mistakes_the_first_is_told() {
    assert_eq!(error(&["-e", "x", "-o", "y"]), "qemu-nbd: Invalid shared device number 'x'");
    assert_eq!(error(&["-o", "y", "-e", "x"]), "qemu-nbd: Invalid offset 'y'");
    assert_eq!(error(&["-o", "y", "--foo"]), "qemu-nbd: Invalid offset 'y'");
}

#[test]
fn names_and_paths_have_limits() {
    let long = "n".repeat(4097);
    assert!(error(&["-x", &long, "d"]).ends_with("' too long"));
    assert!(error(&["-D", &long, "d"]).starts_with("qemu-nbd: export description '"));
    assert_eq!(serve(&["-x", &long[1..], "d"]).name.len(), 4096);
    let path = format!("/{}", "p".repeat(107));
    let text = error(&["-k", &path, "d"]);
    assert!(text.ends_with("is too long\nPath must be less than 108 bytes"), "{text}");
    assert!(parsed(&["-k", &path[..107], "d"]).is_ok());
}

#[test]
fn a_snapshot_has_an_id_or_a_name_or_both() {
    let named = |text: &str| serve(&["-l", text, "disk"]).images.snapshot.expect("a snapshot");
    assert_eq!(named("a"), SnapshotName::IdOrName("a".into()));
    let both = SnapshotName::Both { id: Some("1".into()), name: Some("n".into()) };
    assert_eq!(named("snapshot.id=1,snapshot.name=n"), both);
    assert!(serve(&["-l", "a", "disk"]).read_only);
}

#[test]
fn help_and_version_end_the_reading() {
    assert_eq!(parsed(&["-k", "/s", "--help", "--foo-is-not-reached"]), Ok(Invocation::Help));
    assert_eq!(parsed(&["-V", "a", "b"]), Ok(Invocation::Version));
    assert_eq!(parsed(&["-h"]), Ok(Invocation::Help));
}
