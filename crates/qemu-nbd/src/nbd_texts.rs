//! Failures of serving in the words of `qemu-nbd`, and what is refused in them before.
//!
//! Promises: pure; decides by the cause of a failure, never by its text; a failure that `qemu-nbd`
//! does not know keeps our words.

use std::path::Path;

use ringdisk_daemon::failure::{Cause, Exit, Failure};
use ringdisk_disk::Cause as Image;
use ringdisk_disk::name::FileName;
use ringdisk_qcow2::Cause as Qcow2;
use ringdisk_storage::Cause as Storage;

use crate::options::{Images, Listen, Serve};
use crate::values::Aio;

/// A service manager passes several sockets.
pub const SEVERAL_SOCKETS: &str = "qemu-nbd does not support socket activation with LISTEN_FDS > 1";

/// What `qemu-nbd` refuses of where clients find the server.
///
/// * `is_activated`: a service manager passes the socket.
///
/// Errors: the text for people, without the name of the program.
pub fn refuse_place(asked: &Serve, is_activated: bool) -> Result<(), String> {
    if let Some(text) = asked.said_place.filter(|_| is_activated) {
        return Err(String::from(text));
    }
    if asked.device.is_some() && asked.tls.credentials.is_some() {
        return Err(String::from("TLS is not supported with a host device"));
    }
    Ok(())
}

/// The socket cannot get its label.
///
/// * `why`: in the words of the system.
pub fn of_label(label: &str, why: &str) -> String {
    format!("Cannot set SELinux socket create context to {label}: {why}")
}

/// What `qemu-nbd` refuses too of the image and the address, or what we lack.
///
/// * `listen`: where the server listens; `None`: a service manager passes the socket.
///
/// Errors: the text for people, without the name of the program.
pub fn refuse(asked: &Serve, listen: Option<&Listen>) -> Result<(), String> {
    if let Some(Listen::Tcp(address)) = listen
        && address.port.parse::<u16>().is_err()
    {
        let (host, port) = (&address.host, &address.port);
        return Err(not_resolved(
            &format!("{host}:{port}"),
            "Servname not supported for ai_socktype",
        ));
    }
    refuse_images(&asked.images)
}

/// Errors: options or a format that we do not have.
fn refuse_images(images: &Images) -> Result<(), String> {
    let file = images.file.to_string_lossy();
    let cannot = |why: &str| Err(not_opened(&file, why));
    let name = match images.are_options {
        true => FileName::of_options(&file),
        false => FileName::of_user(Path::new(&images.file)),
    };
    if let Err(error) = name {
        return cannot(&error.to_string());
    }
    if let Some(format) = &images.format
        && !["raw", "qcow2"].contains(&format.as_str())
    {
        return cannot(&format!("Unknown driver '{format}'"));
    }
    if images.aio == Aio::Native && !images.cache.direct() {
        return cannot(
            "aio=native was specified, but it requires cache.direct=on, which was not specified.",
        );
    }
    if images.file.is_empty() {
        return cannot("the name is empty");
    }
    Ok(())
}

/// A failure in the words of `qemu-nbd`, without its name in front.
///
/// * `is_nowhere`: the directory of the Unix socket does not exist.
pub fn of_failure(asked: &Serve, failure: &Failure, is_nowhere: bool) -> String {
    let file = asked.images.file.to_string_lossy();
    match failure.cause() {
        // The image is known to who started this.
        Some(Cause::BitmapNotFound { name }) => return format!("Bitmap '{name}' is not found"),
        Some(Cause::BitmapUnusable { name }) => {
            return format!("Bitmap '{name}' is inconsistent and cannot be used");
        }
        Some(Cause::PidFile { why }) => return format!("Could not create {why}"),
        _ => {}
    }
    match (failure.image_cause(), &asked.listen) {
        (Some(Image::NotQcow2 { .. }), _) => {
            return not_opened(&file, "Image is not in qcow2 format");
        }
        (Some(Image::BeginsBehindEnd { offset, size }), _) if asked.images.offset > 0 => {
            return format!(
                "Offset ({offset}) cannot be greater than size of the containing file ({size})"
            );
        }
        (Some(Image::Qcow2(Qcow2::NoSnapshotToLoad)), _) => {
            return String::from("Failed to load snapshot: Can't find snapshot");
        }
        (_, Listen::Unix(path)) if is_nowhere => {
            return format!(
                "Failed to bind socket to {}: No such file or directory",
                path.display()
            );
        }
        _ => {}
    }
    match (failure.exit, failure.cause()) {
        (Exit::Locked, Some(Cause::NotListening)) => {
            String::from("Failed to find an available port: Address already in use")
        }
        (_, Some(Cause::NoHost { place, why })) => not_resolved(place, why),
        (Exit::Locked, _)
            if matches!(failure.image_cause(), Some(Image::Storage(Storage::InUse { .. }))) =>
        {
            let kind = if asked.read_only { "shared \"write\"" } else { "\"write\"" };
            let lock = format!("Failed to get {kind} lock");
            not_opened(&file, &format!("{lock}\nIs another process using the image [{file}]?"))
        }
        (
            Exit::Image,
            Some(Cause::Image(Image::Storage(Storage::NotOpened { is_missing: true, .. }))),
        ) => not_opened(&file, &format!("Could not open '{file}': No such file or directory")),
        (Exit::Image, _) => not_opened(&file, failure.message()),
        (Exit::Permission, Some(Cause::Image(_))) => {
            not_opened(&file, &format!("Could not open '{file}': Permission denied"))
        }
        _ => failure.message().to_owned(),
    }
}

fn not_opened(file: &str, why: &str) -> String {
    format!("Failed to blk_new_open '{file}': {why}")
}

fn not_resolved(place: &str, why: &str) -> String {
    format!("address resolution failed for {place}: {why}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Invocation, parse};

    fn serve(line: &str) -> Serve {
        let Ok(Invocation::Serve(serve)) = parse("qemu-nbd", line.split(' ').map(Into::into))
        else {
            panic!("{line}")
        };
        *serve
    }

    #[test]
    fn what_we_lack_is_named() {
        for (line, text) in [
            ("-f vmdk disk", "Failed to blk_new_open 'disk': Unknown driver 'vmdk'"),
            (
                "--aio=native disk",
                "Failed to blk_new_open 'disk': aio=native was specified, but it requires \
                 cache.direct=on, which was not specified.",
            ),
            (
                "-p abc disk",
                "address resolution failed for 0.0.0.0:abc: Servname not supported for ai_socktype",
            ),
        ] {
            let serve = serve(line);
            assert_eq!(refuse(&serve, Some(&serve.listen)).unwrap_err(), text);
        }
        let unknown = serve("--image-opts driver=vmdk,file.filename=a");
        let unknown = refuse(&unknown, Some(&unknown.listen)).unwrap_err();
        assert!(unknown.starts_with("Failed to blk_new_open 'driver=vmdk,file.filename=a': "));
        let passed = serve("-p abc disk");
        assert_eq!(refuse(&passed, None), Ok(()));
    }

    #[test]
    fn the_cause_decides_and_not_the_text() {
        let asked = serve("-k /run/s disk");
        let said = |exit, cause| {
            of_failure(&asked, &Failure::new(exit, "our words").because(cause), false)
        };
        let name = || String::from("b");
        assert_eq!(
            said(Exit::Image, Cause::BitmapNotFound { name: name() }),
            "Bitmap 'b' is not found"
        );
        assert_eq!(
            said(Exit::Image, Cause::Image(Image::NotQcow2 { file: name() }.of_part())),
            "Failed to blk_new_open 'disk': Image is not in qcow2 format"
        );
        let behind = Cause::Image(Image::BeginsBehindEnd { offset: 9, size: 8 });
        let part = serve("-k /run/s -o 9 disk");
        let behind = Failure::new(Exit::Image, "our words").because(behind);
        assert_eq!(
            of_failure(&part, &behind, false),
            "Offset (9) cannot be greater than size of the containing file (8)"
        );
        // The part that a list of options asks for.
        assert_eq!(of_failure(&asked, &behind, false), "Failed to blk_new_open 'disk': our words");
        let lock = Storage::InUse { file: name(), by: ringdisk_storage::OtherUse::Alone };
        assert_eq!(
            said(Exit::Locked, Cause::Image(Image::Storage(lock))),
            "Failed to blk_new_open 'disk': Failed to get \"write\" lock\n\
             Is another process using the image [disk]?"
        );
        // Another process has the socket.
        let socket = Failure::new(Exit::Locked, "'/run/s' is in use");
        assert_eq!(of_failure(&asked, &socket, false), "'/run/s' is in use");
        let text = "Failed to bind socket to /run/s: No such file or directory";
        assert_eq!(of_failure(&asked, &socket, true), text);
    }
}
