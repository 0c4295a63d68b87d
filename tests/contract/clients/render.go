// Render the template in a file with the values in another one, which is JSON.
package main

import (
	"encoding/json"
	"os"
	"text/template"
)

func main() {
	chat := template.Must(template.ParseFiles(os.Args[1]))
	text, err := os.ReadFile(os.Args[2])
	if err != nil {
		panic(err)
	}
	var values any
	if err := json.Unmarshal(text, &values); err != nil {
		panic(err)
	}
	if err := chat.Execute(os.Stdout, values); err != nil {
		panic(err)
	}
}
