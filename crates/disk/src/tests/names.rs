//! Names of backing files.

use ringdisk_qcow2::Bytes;
use std::path::Path;

use ringdisk_testkit::sim::Prng;

use crate::name::{FileName, NAME_BYTES_MAX};
use crate::{AllowedHost, Cache, DetectZeroes, Discard, ErrorKind, Format, ImageOptions};

fn path_of(name: &str) -> String {
    let parsed = FileName::parse(name.as_bytes()).expect("name");
    parsed.path.to_str().expect("text").to_owned()
}

fn kind_of(name: &[u8]) -> ErrorKind {
    FileName::parse(name).expect_err("refused").kind()
}

#[test]
fn plain_paths_are_taken_as_they_are() {
    for name in ["base.raw", "../x/y", "/a b/c", "./a:b", "dir/a:b", "ö", " "] {
        assert_eq!(path_of(name), name);
    }
}

#[test]
fn the_file_prefix_is_dropped() {
    assert_eq!(path_of("file:base.raw"), "base.raw");
    assert_eq!(path_of("file:/a/b"), "/a/b");
    assert_eq!(path_of("file:a:b"), "a:b");
}

#[test]
fn protocols_are_refused_by_name() {
    for name in ["http://host/x", "rbd:pool/x", "fat:dir", "x:y", ":x"] {
        let error = FileName::parse(name.as_bytes()).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{name}");
        let protocol = name.split(':').next().expect("word");
        assert!(error.message().contains(&format!("'{protocol}:'")), "{error}");
    }
}

#[test]
fn broken_names_are_invalid() {
    let long = vec![b'a'; NAME_BYTES_MAX + 1];
    for name in [&b""[..], b"file:", b"a\0b", &long, b"json:", b"json:{", b"json:[]"] {
        assert_eq!(kind_of(name), ErrorKind::Invalid);
    }
}

#[test]
fn json_names_of_plain_files_are_understood() {
    let qcow2 = Some(Format::Qcow2);
    let cases = [
        (r#"{"driver":"qcow2","file":{"driver":"file","filename":"x"}}"#, qcow2),
        (r#"{"driver":"qcow2","file.filename":"x"}"#, qcow2),
        (r#"{"driver":"qcow2","file.driver":"file","file.filename":"x"}"#, qcow2),
        (r#"{"driver":"raw","file":{"driver":"host_device","filename":"x"}}"#, Some(Format::Raw)),
        (r#"{"driver":"file","filename":"x"}"#, None),
        (r#"{"filename":"x"}"#, None),
        (r#"{"file":{"filename":"x"}}"#, None),
        (r#"{"driver":"file","filename":"file:x","locking":"off","cache.direct":true}"#, None),
    ];
    for (text, format) in cases {
        let parsed = FileName::parse(format!("json:{text}").as_bytes()).expect(text);
        assert_eq!(parsed.path, Path::new("x"), "{text}");
        assert_eq!(parsed.format, format, "{text}");
        assert!(!parsed.without_backing);
    }
}

#[test]
fn json_windows_of_raw_files_are_understood() {
    let text = br#"json:{"driver":"raw","offset":512,"size":"1024","file.filename":"x"}"#;
    let parsed = FileName::parse(text).expect("name");
    assert_eq!((parsed.raw_offset, parsed.raw_size), (512, Some(Bytes(1024))));
}

#[test]
fn a_json_name_can_cut_the_chain() {
    let text = br#"json:{"driver":"qcow2","backing":null,"file.filename":"x"}"#;
    assert!(FileName::parse(text).expect("name").without_backing);
}

#[test]
fn json_names_of_anything_else_are_refused() {
    let unsupported = [
        r#"{"driver":"nbd","host":"h","tls-creds":"t"}"#,
        r#"{"driver":"qcow2","file":{"driver":"https","url":"x"}}"#,
        r#"{"driver":"qcow2","file":"node0"}"#,
        r#"{"driver":"qcow2","encrypt.format":"aes","file.filename":"x"}"#,
        r#"{"driver":"qcow2","data-file":{"filename":"y"},"file.filename":"x"}"#,
        r#"{"driver":"qcow2","backing":{"driver":"null-co"},"file.filename":"x"}"#,
        r#"{"driver":"qcow2","file.filename":"x","file.pr-manager":"y"}"#,
        r#"{"driver":"vmdk","file.filename":"x"}"#,
    ];
    for text in unsupported {
        assert_eq!(kind_of(format!("json:{text}").as_bytes()), ErrorKind::Unsupported, "{text}");
    }
    let invalid = [
        r#"{"driver":"qcow2"}"#,
        r#"{"driver":"qcow2","file":{}}"#,
        r#"{"driver":"qcow2","file":7}"#,
        r#"{"driver":7,"filename":"x"}"#,
        r#"{"driver":"file","filename":""}"#,
        r#"{"driver":"file","filename":"a\u0000b"}"#,
        r#"{"driver":"raw","offset":-1,"file.filename":"x"}"#,
        r#"{"driver":"qcow2","file":{"filename":"x"},"file.filename":"y"}"#,
    ];
    for text in invalid {
        assert_eq!(kind_of(format!("json:{text}").as_bytes()), ErrorKind::Invalid, "{text}");
    }
}

#[test]
fn deep_json_is_refused_without_using_up_the_stack() {
    let name = format!("json:{}", "[".repeat(NAME_BYTES_MAX - 5));
    assert_eq!(kind_of(name.as_bytes()), ErrorKind::Invalid);
}

#[test]
fn random_names_are_taken_or_refused() {
    const WORDS: [&[u8]; 12] = [
        b"json:",
        b"{",
        b"}",
        b"\"file\"",
        b"\"driver\"",
        b":",
        b",",
        b"\"qcow2\"",
        b"\"x\"",
        b"[",
        b".",
        b"\"file.filename\"",
    ];
    let mut chance = Prng::new(7);
    for _ in 0..20_000 {
        let mut name = if chance.coin() { b"json:{".to_vec() } else { Vec::new() };
        for _ in 0..chance.below(12) {
            let word = usize::try_from(chance.below(WORDS.len() as u64)).expect("index");
            name.extend_from_slice(WORDS[word]);
            let mut byte = [0];
            chance.fill(&mut byte);
            name.extend_from_slice(&byte[..usize::from(byte[0] < 16)]);
        }
        let _ = FileName::parse(&name);
    }
}

#[test]
fn addresses_of_nbd_exports_are_understood_in_every_form() {
    let unix = "nbd+unix:///n?socket=/s";
    for (name, uri) in [
        ("nbd://host/x", "nbd://host/x"),
        ("nbd:unix:/s:exportname=n", unix),
        (r#"json:{"driver":"nbd","server":{"type":"unix","path":"/s"},"export":"n"}"#, unix),
        (r#"json:{"driver":"nbd","path":"/s","export":"n"}"#, unix),
        (r#"json:{"server.type":"unix","server.path":"/s","export":"n","driver":"nbd"}"#, unix),
        (r#"json:{"driver":"raw","file":{"driver":"nbd","path":"/s","export":"n"}}"#, unix),
        (r#"json:{"driver":"nbd","host":"h","port":"5","reconnect-delay":3}"#, "nbd://h:5/"),
    ] {
        let parsed = FileName::parse(name.as_bytes()).expect(name);
        assert_eq!(parsed.path.to_str(), Some(uri), "{name}");
        assert!(parsed.nbd.is_some());
        assert_eq!(parsed.seen_from("/srv".as_ref()).to_str(), Some(uri));
    }
    for name in [
        "nbds://host/x",
        r#"json:{"driver":"nbd"}"#,
        r#"json:{"driver":"nbd","path":"/s","host":"h"}"#,
        r#"json:{"driver":"nbd","host":"h","port":0}"#,
        r#"json:{"driver":"nbd","host":"h","port":65536}"#,
        r#"json:{"driver":"nbd","path":"/s","tls-creds":"t"}"#,
        r#"json:{"driver":"nbd","path":"/s","other":1}"#,
        r#"json:{"driver":"nbd","server":"/s"}"#,
    ] {
        assert!(FileName::parse(name.as_bytes()).is_err(), "{name}");
    }
}

#[test]
fn hosts_are_allowed_by_name_by_port_and_by_socket() {
    let server = |uri: &str| FileName::parse(uri.as_bytes()).unwrap().nbd.unwrap().server;
    let allows =
        |host: &str, uri: &str| host.parse::<AllowedHost>().expect(host).allows(&server(uri));
    assert!(allows("Host", "nbd://host:5/x") && allows("host:5", "nbd://host:5/x"));
    assert!(!allows("host:5", "nbd://host/x") && !allows("other", "nbd://host/x"));
    assert!(allows("[::1]:10809", "nbd://[::1]/") && allows("::1", "nbd://[::1]:7/"));
    assert!(allows("unix:/s", "nbd+unix:///x?socket=/s"));
    assert!(!allows("unix:/t", "nbd+unix:///x?socket=/s"));
    assert!(!allows("host", "nbd+unix:///x?socket=host"));
    for wrong in ["", "a b", "host:", "host:0", "host:x", "unix:", "nbd://host", "[::1", "a@b"] {
        assert!(wrong.parse::<AllowedHost>().is_err(), "{wrong}");
    }
}

#[test]
fn single_quotes_are_as_good_as_double_ones() {
    let parsed = FileName::parse(b"json:{'driver':'qcow2','file.filename':'it\\'s \"x\"'}");
    let parsed = parsed.expect("name");
    assert_eq!((parsed.format, parsed.path.to_str()), (Some(Format::Qcow2), Some("it's \"x\"")));
    assert_eq!(kind_of(b"json:{'driver':'qcow2}"), ErrorKind::Invalid);
}

#[test]
fn the_user_names_files_that_an_image_may_not_name() {
    let of = |name: &str| FileName::of_user(Path::new(name)).expect("name").plain_path();
    for (name, path) in [
        ("disk", "disk"),
        ("a:b", "./a:b"),
        ("file:disk", "disk"),
        ("file:nbd:x", "./nbd:x"),
        ("file:json:{}", "./json:{}"),
        ("json:{'filename':'file:x'}", "x"),
        ("nbd://h/x", "nbd://h/x"),
    ] {
        assert_eq!(of(name), Path::new(path), "{name}");
    }
    assert!(FileName::of_user(Path::new("")).expect("a path").path.as_os_str().is_empty());
    for name in ["file:", "json:", "json:{}", "nbd:"] {
        assert!(FileName::of_user(Path::new(name)).is_err(), "{name}");
    }
}

/// The options of an image that a description is added to.
fn added(text: &str, mut options: ImageOptions) -> Result<ImageOptions, crate::Error> {
    FileName::of_options(text)?.add_to(&mut options)?;
    Ok(options)
}

#[test]
fn a_description_is_added_to_the_options_of_the_command() {
    let text = "driver=raw,offset=512,size=4096,read-only=off,cache.direct=on,discard=ignore,\
                detect-zeroes=unmap,file.filename=x,file.locking=off";
    let options = ImageOptions { window_offset: 1024, ..ImageOptions::default() };
    let options = added(text, options).expect("fits");
    assert_eq!(options.format, Some(Format::Raw));
    assert_eq!((options.window_offset, options.window_size), (1536, Some(Bytes(3072))));
    assert_eq!((options.cache, options.discard), (Cache::None, Discard::Ignore));
    assert_eq!(options.detect_zeroes, DetectZeroes::Unmap);

    let text = "driver=qcow2,backing=,lazy-refcounts=on,file.driver=file,file.filename=x,\
                file.cache.no-flush=on,read-only=on,auto-read-only=on";
    let options = added(text, ImageOptions::default()).expect("fits");
    assert!(options.without_backing && options.read_only);
    assert_eq!((options.cache, options.lazy_refcounts), (Cache::Unsafe, Some(true)));
    // The outer switch counts.
    let text = "driver=qcow2,cache.direct=off,file.cache.direct=on,file.filename=x";
    assert_eq!(added(text, ImageOptions::default()).expect("fits").cache, Cache::Writeback);
    let bare = added("driver=file,filename=x", ImageOptions::default()).expect("fits");
    assert_eq!(bare.format, Some(Format::Raw));
}

#[test]
fn a_description_that_contradicts_the_command_is_refused() {
    let qcow2 = ImageOptions { format: Some(Format::Qcow2), ..ImageOptions::default() };
    let part = ImageOptions { window_size: Some(Bytes(512)), ..ImageOptions::default() };
    for (text, options, kind) in [
        ("driver=raw,file.filename=x", qcow2.clone(), ErrorKind::Invalid),
        ("driver=file,filename=x", qcow2, ErrorKind::Invalid),
        ("driver=raw,size=512,file.filename=x", part, ErrorKind::Invalid),
        ("file.filename=x,read-only=on", ImageOptions::default(), ErrorKind::PermissionDenied),
        ("file.filename=x,read-only=perhaps", ImageOptions::default(), ErrorKind::Invalid),
        ("file.filename=x,cache.other=on", ImageOptions::default(), ErrorKind::Unsupported),
        ("file.filename=x,cache=on", ImageOptions::default(), ErrorKind::Invalid),
        ("file.filename=x,discard=maybe", ImageOptions::default(), ErrorKind::Invalid),
        (
            "driver=raw,lazy-refcounts=on,file.filename=x",
            ImageOptions::default(),
            ErrorKind::Unsupported,
        ),
    ] {
        assert_eq!(added(text, options).expect_err(text).kind(), kind, "{text}");
    }
}
